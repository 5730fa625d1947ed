"""What a Qwen3-MoE's config.json says."""

from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields

from worker.loader.config import MAX_SIZE, ModelConfig
from worker.loader.experts import ExpertsConfig
from worker.loader.families.dense import dense_config, expect_full_attention
from worker.loader.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    experts: ExpertsConfig
    dense_layers: frozenset[int]
    """Those with a gated MLP in place of experts."""


def qwen3_moe_config(fields: Fields) -> Qwen3MoeConfig:
    """Raises ModelConfigError."""
    fields.flag("output_router_logits", False)
    fields.ignore("router_aux_loss_coef")
    if not fields.flag("use_sliding_window", False):
        fields.ignore("sliding_window", "max_window_layers")
    expect_full_attention(fields)
    config = dense_config(fields, "Qwen3MoeForCausalLM", "qwen3_moe")
    config = replace(config, attention_bias=fields.flag("attention_bias", False))
    key = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    num_experts = fields.integer(key, most=MAX_SIZE)
    experts = ExpertsConfig(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", most=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", most=MAX_SIZE),
        is_normalised=fields.flag("norm_topk_prob", False),
    )
    step, named = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers", [])
    dense = frozenset(i for i in range(config.num_layers) if i in named or (i + 1) % step)
    shared = {field.name: getattr(config, field.name) for field in dataclass_fields(config)}
    return Qwen3MoeConfig(**shared, experts=experts, dense_layers=dense)
