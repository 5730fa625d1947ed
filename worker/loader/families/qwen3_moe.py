"""What a Qwen3-MoE's config.json says."""

from worker.loader.config import MAX_SIZE
from worker.loader.experts import ExpertsConfig
from worker.loader.families.dense import dense_config, extended, same_windows
from worker.loader.families.mistral import mistral_window
from worker.loader.families.moe import MoeConfig, qwen_dense_layers
from worker.loader.fields import Fields


def qwen3_moe_config(fields: Fields) -> MoeConfig:
    """Raises ModelConfigError."""
    fields.flag("output_router_logits", False)
    fields.ignore("router_aux_loss_coef")
    base = dense_config(fields, "Qwen3MoeForCausalLM", "qwen3_moe")
    key = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    num_experts = fields.integer(key, most=MAX_SIZE)
    experts = ExpertsConfig(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", most=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", most=MAX_SIZE),
        is_normalised=fields.flag("norm_topk_prob", False),
    )
    return extended(
        base,
        MoeConfig,
        experts=experts,
        dense_layers=qwen_dense_layers(fields, base.num_layers),
        has_qk_norm=True,
        attention_bias=fields.flag("attention_bias", False),
        windows=_windows(fields, base.num_layers, base.max_model_len),
    )


def _windows(fields: Fields, num_layers: int, max_model_len: int) -> tuple[int | None, ...]:
    """Other than in a dense Qwen3, all layers have one or none has: `max_window_layers` does not count."""
    fields.ignore("sliding_window", "max_window_layers")
    window = mistral_window(fields) if fields.flag("use_sliding_window", False) else None
    return same_windows(fields, window, num_layers, max_model_len)
