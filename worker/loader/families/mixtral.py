"""What a Mixtral's config.json says."""

from worker.loader.config import MAX_CONTEXT, MAX_SIZE
from worker.loader.experts import ExpertsConfig
from worker.loader.families.dense import dense_config, extended, same_windows
from worker.loader.families.moe import MoeConfig
from worker.loader.fields import Fields
from worker.loader.hf_rope import hf_rope

DEFAULT_THETA = 1e6
"""What `transformers` takes where the field is absent."""


def mixtral_config(fields: Fields) -> MoeConfig:
    """Raises ModelConfigError."""
    fields.flag("output_router_logits", False)
    # Of training alone.
    fields.ignore("router_aux_loss_coef", "router_jitter_noise")
    max_model_len = fields.integer("max_position_embeddings", most=MAX_CONTEXT)
    rope = hf_rope(fields, max_model_len, theta=DEFAULT_THETA)
    base = dense_config(fields, "MixtralForCausalLM", "mixtral", rope=rope)
    num_experts = fields.integer("num_local_experts", most=MAX_SIZE)
    experts = ExpertsConfig(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", most=num_experts),
        intermediate_size=base.intermediate_size,
    )
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    windows = same_windows(fields, window, base.num_layers, max_model_len)
    return extended(base, MoeConfig, experts=experts, windows=windows)
