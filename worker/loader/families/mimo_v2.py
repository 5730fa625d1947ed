"""What a MiMo-V2-Flash's config.json says, as published or as `transformers` saves it."""

from dataclasses import dataclass, replace

from worker.loader.config import MAX_SIZE, ModelConfig
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
from worker.loader.families.moe import MoeConfig, deepseek_experts
from worker.loader.families.mtp import MTP_NAMES
from worker.loader.fields import Fields
from worker.loader.hf_rope import hf_partial_rope, hf_rope_of_type
from worker.loader.rope import RopeConfig

FULL_THETA, LOCAL_THETA = 5e6, 1e4
DEFAULT_ROTARY_FACTOR, DEFAULT_WINDOW, DEFAULT_EPS = 0.334, 129, 1e-5
"""What `transformers` takes where fields are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MimoConfig(MoeConfig):
    """What `ModelConfig` says of attention is of the layers that see everything; those with a window have sinks."""

    v_head_dim: int
    value_scale: float
    local: ModelConfig
    """The same of the layers with a window."""
    local_v_head_dim: int
    local_window: int | None
    """None: it is not narrower than the context."""
    is_local: tuple[bool, ...]
    """Of each layer: whether it is one of those with a window, be that wider than the context."""


def mimo_v2_flash_config(fields: Fields) -> MimoConfig:
    """Raises ModelConfigError."""
    fields.expect("output_router_logits", False)
    fields.expect("n_shared_experts", 0)
    fields.expect("add_full_attention_sink_bias", False)
    fields.expect("add_swa_attention_sink_bias", True)
    fields.expect("hybrid_block_size")
    fields.ignore("attention_chunk_size")  # the window, under another name
    rope, local_rope = _ropes(fields)
    eps = fields.number("layernorm_epsilon", DEFAULT_EPS)
    base = replace(
        dense_config(fields, "MiMoV2FlashForCausalLM", "mimo_v2_flash", rope=rope, eps=eps),
        qkv_bias=fields.flag("attention_bias", False),
    )
    v_head_dim = fields.integer("v_head_dim", most=MAX_SIZE)
    local = _local(fields, base, local_rope)
    for key, config in (("head_dim", base), ("swa_head_dim", local)):
        if config.rope.rotary_dim(config.head_dim) % 2 or not config.rope.rotary_dim(config.head_dim):
            raise fields.error(key, "a size of which partial_rotary_factor makes an even number above 0")
    types = _layer_types(fields, base.num_layers)
    # The published field counts the tokens before, the other one the token itself, too.
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    if "sliding_window_size" in fields:
        window = fields.integer("sliding_window_size") + 1
    return extended(
        base,
        MimoConfig,
        experts=deepseek_experts(fields, default_scale=1.0),
        dense_layers=_dense_layers(fields, base.num_layers),
        v_head_dim=v_head_dim,
        value_scale=fields.number("attention_value_scale", 1.0),
        local=local,
        local_v_head_dim=fields.integer("swa_v_head_dim", v_head_dim, most=MAX_SIZE),
        local_window=window if window < base.max_model_len else None,
        is_local=tuple(kind == SLIDING for kind in types),
        windows=layer_windows(fields, types, window, base.max_model_len),
        skipped_weights=MTP_NAMES,
    )


def _local(fields: Fields, base: ModelConfig, rope: RopeConfig) -> ModelConfig:
    heads = fields.integer("swa_num_attention_heads", base.num_heads, most=MAX_SIZE)
    kv_heads = num_kv_heads(fields, "swa_num_key_value_heads", heads, 2 * base.num_kv_heads)
    dim = head_dim(fields, "swa_head_dim", base.head_dim * heads, heads)
    return replace(base, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rope=rope)


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything and of those with a window: an object for each, or fields side by side."""
    if "rope_parameters" in fields:
        fields.section("rope_parameters").refuse_unread({FULL, SLIDING})
        full, local = (
            hf_rope_of_type(fields, kind, theta, rotary_factor=DEFAULT_ROTARY_FACTOR)
            for kind, theta in ((FULL, FULL_THETA), (SLIDING, LOCAL_THETA))
        )
        return full, local
    fields.expect("rope_scaling")
    length = fields.integer("max_position_embeddings")
    rope = hf_partial_rope(fields, length, DEFAULT_ROTARY_FACTOR, theta=FULL_THETA)
    return rope, replace(rope, theta=fields.number("swa_rope_theta", LOCAL_THETA, above=1))


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    default = [SLIDING if i and (i + 1) % 6 else FULL for i in range(num_layers)]
    if "hybrid_layer_pattern" in fields:
        default = [SLIDING if bit else FULL for bit in _bits(fields, "hybrid_layer_pattern", num_layers)]
    types = layer_types(fields, num_layers, default)
    if "hybrid_layer_pattern" in fields and types != default:
        raise fields.error("layer_types", "what hybrid_layer_pattern says")
    return types


def _dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    default = ["sparse" if i else "dense" for i in range(num_layers)]
    if "moe_layer_freq" in fields:
        default = ["sparse" if bit else "dense" for bit in _bits(fields, "moe_layer_freq", num_layers)]
    types = fields.texts("mlp_layer_types", default)
    if len(types) != num_layers or set(types) - {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"dense or sparse for each of the {num_layers} layers")
    if "moe_layer_freq" in fields and types != default:
        raise fields.error("mlp_layer_types", "what moe_layer_freq says")
    return frozenset(i for i, kind in enumerate(types) if kind == "dense")


def _bits(fields: Fields, key: str, num_layers: int) -> list[int]:
    bits = fields.integers(key)
    if len(bits) != num_layers or set(bits) - {0, 1}:
        raise fields.error(key, f"0 or 1 for each of the {num_layers} layers")
    return bits
