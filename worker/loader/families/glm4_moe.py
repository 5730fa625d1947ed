"""What the config.json of a GLM-4.5 or GLM-4.6 says."""

from worker.loader.config import MAX_CONTEXT
from worker.loader.families.dense import dense_config, extended
from worker.loader.families.moe import MoeConfig, deepseek_experts, first_dense_layers
from worker.loader.families.mtp import mtp_weights
from worker.loader.fields import Fields
from worker.loader.hf_rope import hf_partial_rope

DEFAULT_ROTARY_FACTOR = 0.5
"""What `transformers` takes where the field is absent."""


def glm4_moe_config(fields: Fields) -> MoeConfig:
    """Raises ModelConfigError."""
    fields.expect("output_router_logits", False)
    max_model_len = fields.integer("max_position_embeddings", most=MAX_CONTEXT)
    rope = hf_partial_rope(fields, max_model_len, DEFAULT_ROTARY_FACTOR)
    base = dense_config(fields, "Glm4MoeForCausalLM", "glm4_moe", rope=rope)
    return extended(
        base,
        MoeConfig,
        experts=deepseek_experts(fields),
        dense_layers=first_dense_layers(fields, base.num_layers),
        has_qk_norm=fields.flag("use_qk_norm", False),
        qkv_bias=fields.flag("attention_bias", False),
        skipped_weights=mtp_weights(fields, base.num_layers),
    )
