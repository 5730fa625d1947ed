"""A decoder with experts in place of gated MLPs, in most layers or in none."""

from dataclasses import dataclass

from worker.loader.config import MAX_SIZE, ModelConfig
from worker.loader.experts import ExpertsConfig
from worker.loader.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(ModelConfig):
    dense_layers: frozenset[int] = frozenset()
    """Those with a gated MLP in place of experts."""
    has_qk_norm: bool = False
    """Each query and key head is normed before it is rotated."""


def qwen_dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Those that the file names, and those between every so many with experts. Raises ModelConfigError."""
    step, named = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers", [])
    return frozenset(i for i in range(num_layers) if i in named or (i + 1) % step)


def first_dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Those at the beginning, before those with experts. Raises ModelConfigError."""
    fields.expect("moe_layer_freq", 1)
    num_dense = min(fields.integer("first_k_dense_replace", least=0), num_layers)
    kinds = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    if fields.texts("mlp_layer_types", kinds) != kinds:
        raise fields.error("mlp_layer_types", f"dense in the first {num_dense} layers and sparse in the others")
    return frozenset(range(num_dense))


def deepseek_experts(fields: Fields, default_scale: float | None = None) -> ExpertsConfig:
    """Sigmoid scores, corrected for the choice, and shared experts. `default_scale`: of the weights, where the file
    need not say. Raises ModelConfigError."""
    fields.expect("scoring_func", "sigmoid")
    fields.expect("topk_method", "noaux_tc")
    num_experts = fields.integer("n_routed_experts", most=MAX_SIZE)
    num_groups = fields.integer("n_group", most=num_experts)
    if num_experts % num_groups:
        raise fields.error("n_group", f"a divisor of the {num_experts} experts")
    num_top_groups = fields.integer("topk_group", most=num_groups)
    size = fields.integer("moe_intermediate_size", most=MAX_SIZE)
    return ExpertsConfig(
        num_experts=num_experts,
        is_sigmoid=True,
        has_correction=True,
        has_float32_router=True,
        shared_size=fields.integer("n_shared_experts", 0, least=0, most=MAX_SIZE) * size,
        top_k=fields.integer("num_experts_per_tok", most=num_experts // num_groups * num_top_groups),
        intermediate_size=size,
        num_groups=num_groups,
        num_top_groups=num_top_groups,
        is_normalised=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor", default_scale),
    )


def gemma4_experts(fields: Fields) -> ExpertsConfig | None:
    """None: there are none. Raises ModelConfigError."""
    if not fields.flag("enable_moe_block", False):
        fields.ignore("moe_intermediate_size", "num_experts", "top_k_experts")
        return None
    num_experts = fields.integer("num_experts", most=MAX_SIZE)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=fields.integer("top_k_experts", most=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", most=MAX_SIZE),
        is_gelu=True,
    )
