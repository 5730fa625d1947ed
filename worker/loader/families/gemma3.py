"""What a text-only Gemma 3's config.json says."""

from dataclasses import dataclass

from worker.loader.config import ModelConfig
from worker.loader.families.dense import (
    DEFAULT_WINDOW,
    FULL,
    SLIDING,
    dense_config,
    extended,
    layer_types,
    layer_windows,
)
from worker.loader.fields import Fields
from worker.loader.hf_rope import hf_rope, hf_rope_of_type
from worker.loader.rope import RopeConfig

GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4
DEFAULT_HEAD_DIM = 256
DEFAULT_PATTERN = 6
"""Every sixth layer sees everything. All four: what `transformers` takes where fields are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """`rope` is that of the layers that see everything."""

    local_rope: RopeConfig
    """Of the layers with a window."""
    is_local: tuple[bool, ...]
    """Of each layer: whether it is one of those with a window, be that wider than the context."""
    query_scalar: float
    """Scores are divided by its root."""
    logit_soft_cap: float | None


def gemma3_config(fields: Fields) -> Gemma3Config:
    """Raises ModelConfigError."""
    fields.expect("hidden_activation", "gelu_pytorch_tanh")
    fields.expect("use_bidirectional_attention", False)
    fields.expect("attn_logit_softcapping")
    fields.ignore("cache_implementation")
    rope, local_rope = _ropes(fields)
    base = dense_config(fields, "Gemma3ForCausalLM", "gemma3_text", rope=rope, has_silu=False)
    pattern = fields.integer("sliding_window_pattern", DEFAULT_PATTERN)
    types = layer_types(
        fields, base.num_layers, [SLIDING if (i + 1) % pattern else FULL for i in range(base.num_layers)]
    )
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    return extended(
        base,
        Gemma3Config,
        local_rope=local_rope,
        is_local=tuple(kind == SLIDING for kind in types),
        query_scalar=fields.number("query_pre_attn_scalar", 256),
        logit_soft_cap=fields.number("final_logit_softcapping") if "final_logit_softcapping" in fields else None,
        windows=layer_windows(fields, types, window, base.max_model_len),
        head_dim=base.head_dim if "head_dim" in fields else DEFAULT_HEAD_DIM,
        attention_bias=fields.flag("attention_bias", False),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Of global and local layers: an object for each (transformers 5), or fields side by side (older files)."""
    if "rope_parameters" in fields:
        fields.section("rope_parameters").refuse_unread({FULL, SLIDING})
        return hf_rope_of_type(fields, FULL, GLOBAL_THETA), hf_rope_of_type(fields, SLIDING, LOCAL_THETA)
    local = RopeConfig(fields.number("rope_local_base_freq", LOCAL_THETA, above=1))
    return hf_rope(fields, fields.integer("max_position_embeddings"), theta=GLOBAL_THETA), local
