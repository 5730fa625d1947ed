"""What a Gemma 4's config.json says."""

from dataclasses import dataclass, replace

from worker.loader.config import MAX_SIZE, ModelConfig
from worker.loader.experts import ExpertsConfig
from worker.loader.families.dense import (
    FULL,
    SLIDING,
    dense_config,
    extended,
    head_dim,
    layer_types,
    layer_windows,
    num_kv_heads,
)
from worker.loader.families.moe import gemma4_experts
from worker.loader.fields import Fields
from worker.loader.hf_rope import hf_rope_of_type
from worker.loader.rope import RopeConfig

FULL_THETA, LOCAL_THETA, DEFAULT_TURNING_SHARE = 1e6, 1e4, 0.25
DEFAULT_HEAD_DIM, DEFAULT_FULL_HEAD_DIM = 256, 512
DEFAULT_WINDOW, DEFAULT_PATTERN = 512, 6
"""What `transformers` takes where fields are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """What `ModelConfig` says of attention is of the layers with a window."""

    full: ModelConfig
    """The same of the layers that see everything."""
    is_local: tuple[bool, ...]
    """Of each layer: whether it is one of those with a window, be that wider than the context."""
    source_layers: tuple[int | None, ...]
    """Of each layer: whose keys and values it sees; None: its own."""
    is_wide: bool
    """The MLPs of layers without keys of their own are twice as wide."""
    has_keys_as_values: bool
    """In layers that see everything."""
    per_layer_size: int
    """Of what each layer is told of the token beside the hidden state; 0: nothing."""
    per_layer_vocab_size: int
    logit_soft_cap: float | None
    experts: ExpertsConfig | None
    """Beside the MLP of each layer."""


def gemma4_config(fields: Fields) -> Gemma4Config:
    """Raises ModelConfigError."""
    fields.expect("hidden_activation", "gelu_pytorch_tanh")
    fields.expect("use_bidirectional_attention", "vision")  # of images alone
    rope, full_rope = _ropes(fields)
    fields.integer("num_key_value_heads", most=MAX_SIZE)
    base = dense_config(fields, "Gemma4ForCausalLM", "gemma4_text", rope=rope, has_silu=False)
    base = replace(
        base,
        head_dim=base.head_dim if "head_dim" in fields else DEFAULT_HEAD_DIM,
        attention_bias=fields.flag("attention_bias", False),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
    )
    types = _layer_types(fields, base.num_layers)
    has_keys_as_values = fields.flag("attention_k_eq_v", False)
    dim, kv_heads = _full_heads(fields, base, types, has_keys_as_values)
    sources = _source_layers(fields, types)
    size = fields.integer("hidden_size_per_layer_input", 256, least=0, most=MAX_SIZE)
    if not size:
        fields.ignore("vocab_size_per_layer_input")
    parts = ("k_norm.", "k_proj.", "v_norm.", "v_proj.")
    return extended(
        base,
        Gemma4Config,
        full=replace(base, head_dim=dim, num_kv_heads=kv_heads, rope=full_rope),
        is_local=tuple(kind == SLIDING for kind in types),
        source_layers=sources,
        is_wide=fields.flag("use_double_wide_mlp", False),
        has_keys_as_values=has_keys_as_values,
        per_layer_size=size,
        per_layer_vocab_size=fields.integer("vocab_size_per_layer_input", least=base.vocab_size) if size else 0,
        logit_soft_cap=fields.number("final_logit_softcapping") if "final_logit_softcapping" in fields else None,
        experts=gemma4_experts(fields),
        windows=layer_windows(fields, types, fields.integer("sliding_window", DEFAULT_WINDOW), base.max_model_len),
        skipped_weights=tuple(
            f"model.layers.{layer}.self_attn.{part}"
            for layer, source in enumerate(sources)
            if source is not None
            for part in parts
        ),
    )


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    default = [SLIDING if (i + 1) % DEFAULT_PATTERN and i < num_layers - 1 else FULL for i in range(num_layers)]
    types = layer_types(fields, num_layers, default)
    if types[-1] != FULL:
        raise fields.error("layer_types", f"{FULL} in the last layer")
    return types


def _full_heads(fields: Fields, base: ModelConfig, types: list[str], has_keys_as_values: bool) -> tuple[int, int]:
    """(size, number of KV heads) of layers that see everything: said of each of them (transformers 5), or once."""
    if "per_layer_config" not in fields:
        whole = DEFAULT_FULL_HEAD_DIM * base.num_heads
        dim = head_dim(fields, "global_head_dim", whole, base.num_heads)
        if not has_keys_as_values:
            fields.ignore("num_global_key_value_heads")
            return dim, base.num_kv_heads
        return dim, num_kv_heads(fields, "num_global_key_value_heads", base.num_heads, base.num_kv_heads)
    fields.ignore("global_head_dim", "num_global_key_value_heads")
    section = fields.section("per_layer_config")
    found = set()
    for layer in section.names():
        heads = section.section(layer)
        found.add(
            (
                head_dim(heads, "head_dim", base.head_dim * base.num_heads, base.num_heads),
                num_kv_heads(heads, "num_key_value_heads", base.num_heads, base.num_kv_heads),
            )
        )
        heads.refuse_unread(())
    full = {str(i) for i, kind in enumerate(types) if kind == FULL}
    if len(found) != 1 or {name.lstrip("0") or "0" for name in section.names()} != full:  # they may be 04, 09, 14
        raise fields.error("per_layer_config", f"the same for each layer of {FULL}, and for no other,")
    return found.pop()


def _source_layers(fields: Fields, types: list[str]) -> tuple[int | None, ...]:
    """The last layers see what the last one of their kind before them sees."""
    num_own = len(types) - fields.integer("num_kv_shared_layers", 0, least=0, most=len(types))
    last = {kind: layer for layer, kind in enumerate(types[:num_own])}
    if set(types) - last.keys():
        raise fields.error("num_kv_shared_layers", "a number that leaves a layer of each kind its own keys")
    return tuple(None if layer < num_own else last[kind] for layer, kind in enumerate(types))


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Of layers with a window, and of those that see everything."""
    if "rope_parameters" not in fields:
        return RopeConfig(LOCAL_THETA), RopeConfig(FULL_THETA, turning_share=DEFAULT_TURNING_SHARE)
    fields.section("rope_parameters").refuse_unread({FULL, SLIDING})
    local, full = (
        hf_rope_of_type(fields, kind, theta, is_proportional=True)
        for kind, theta in ((SLIDING, LOCAL_THETA), (FULL, FULL_THETA))
    )
    return local, full
