"""What the config.json of a GLM-4.5 or GLM-4.6 says."""

from dataclasses import replace

from worker.loader.config import MAX_CONTEXT
from worker.loader.families.deepseek import deepseek_experts, num_dense_layers
from worker.loader.families.dense import dense_config, extended
from worker.loader.families.moe import MoeConfig
from worker.loader.families.mtp import mtp_weights
from worker.loader.fields import Fields
from worker.loader.hf_rope import hf_rope
from worker.loader.rope import RopeConfig

DEFAULT_ROTARY_FACTOR = 0.5
"""What `transformers` takes where the field is absent."""


def glm4_moe_config(fields: Fields) -> MoeConfig:
    """Raises ModelConfigError."""
    fields.expect("output_router_logits", False)
    rope = _rope(fields, fields.integer("max_position_embeddings", most=MAX_CONTEXT))
    base = dense_config(fields, "Glm4MoeForCausalLM", "glm4_moe", rope=rope)
    return extended(
        base,
        MoeConfig,
        experts=deepseek_experts(fields),
        dense_layers=frozenset(range(num_dense_layers(fields, base.num_layers))),
        has_qk_norm=fields.flag("use_qk_norm", False),
        qkv_bias=fields.flag("attention_bias", False),
        skipped_weights=mtp_weights(fields, base.num_layers),
    )


def _rope(fields: Fields, max_model_len: int) -> RopeConfig:
    rope = hf_rope(fields, max_model_len, is_partial=True)
    places = (fields, fields.section("rope_scaling"), fields.section("rope_parameters"))
    is_said = any("partial_rotary_factor" in place for place in places)
    return rope if is_said else replace(rope, rotary_factor=DEFAULT_ROTARY_FACTOR)
