"""What the metadata of a GGUF file say of models with experts beyond those of a dense decoder. No torch."""

from collections.abc import Collection
from dataclasses import replace

from worker.loader.config import MAX_LAYERS, MAX_SIZE, ModelConfig
from worker.loader.experts import ExpertsConfig
from worker.loader.families.dense import extended
from worker.loader.families.moe import MoeConfig
from worker.loader.fields import Fields

GLM, QWEN = "glm4moe.", "qwen3moe."
SOFTMAX, SIGMOID = 1, 2


def qwen3_moe_from_gguf(fields: Fields, base: ModelConfig) -> MoeConfig:
    """Every layer has experts, and their weights are normalised, as llama.cpp does it. Raises ModelConfigError."""
    fields.expect(f"{QWEN}expert_gating_func", SOFTMAX)
    fields.expect(f"{QWEN}expert_weights_norm", True)
    fields.expect(f"{QWEN}expert_weights_scale", 0, 1)
    fields.expect(f"{QWEN}expert_shared_count", 0)
    num_experts = fields.integer(f"{QWEN}expert_count", most=MAX_SIZE)
    experts = ExpertsConfig(
        num_experts=num_experts,
        top_k=fields.integer(f"{QWEN}expert_used_count", most=num_experts),
        intermediate_size=fields.integer(f"{QWEN}expert_feed_forward_length", most=MAX_SIZE),
    )
    return extended(base, MoeConfig, experts=experts, has_qk_norm=True)


def glm4_moe_from_gguf(fields: Fields, base: ModelConfig, tensors: Collection[str]) -> MoeConfig:
    """Layers for multi-token prediction are counted among the others, behind which they stand; head norms and biases
    are told by the names of `tensors` alone. Raises ModelConfigError."""
    num_mtp = fields.integer(f"{GLM}nextn_predict_layers", 0, least=0, most=MAX_LAYERS)
    num_layers = base.num_layers - num_mtp
    if num_layers < 1:
        raise fields.error(f"{GLM}nextn_predict_layers", f"fewer than the {base.num_layers} of block_count")
    num_dense = fields.integer(f"{GLM}leading_dense_block_count", 0, least=0, most=MAX_LAYERS)
    return extended(
        replace(base, num_layers=num_layers, rope=replace(base.rope, rotary_factor=_rotary_factor(fields, base))),
        MoeConfig,
        experts=_experts(fields),
        dense_layers=frozenset(range(min(num_dense, num_layers))),
        has_qk_norm="blk.0.attn_q_norm.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        skipped_weights=tuple(f"model.layers.{num_layers + i}." for i in range(num_mtp)),
    )


def _rotary_factor(fields: Fields, base: ModelConfig) -> float:
    rotary_dim = fields.integer(f"{GLM}rope.dimension_count", base.head_dim, most=base.head_dim)
    factor = rotary_dim / base.head_dim
    if rotary_dim % 2 or int(base.head_dim * factor) != rotary_dim:
        raise fields.error(f"{GLM}rope.dimension_count", f"an even share of the {base.head_dim} of a head")
    return factor


def _experts(fields: Fields) -> ExpertsConfig:
    fields.expect(f"{GLM}expert_gating_func", SIGMOID)
    num_experts = fields.integer(f"{GLM}expert_count", most=MAX_SIZE)
    num_groups = fields.integer(f"{GLM}expert_group_count", 1, most=num_experts)
    if num_experts % num_groups:
        raise fields.error(f"{GLM}expert_group_count", f"a divisor of the {num_experts} experts")
    num_top_groups = fields.integer(f"{GLM}expert_group_used_count", num_groups, most=num_groups)
    size = fields.integer(f"{GLM}expert_feed_forward_length", most=MAX_SIZE)
    return ExpertsConfig(
        num_experts=num_experts,
        is_sigmoid=True,
        has_correction=True,
        has_float32_router=True,
        shared_size=fields.integer(f"{GLM}expert_shared_count", 0, least=0, most=MAX_SIZE) * size,
        top_k=fields.integer(f"{GLM}expert_used_count", most=num_experts // num_groups * num_top_groups),
        intermediate_size=size,
        num_groups=num_groups,
        num_top_groups=num_top_groups,
        is_normalised=fields.flag(f"{GLM}expert_weights_norm", False),
        scale=fields.number(f"{GLM}expert_weights_scale", 1.0),
    )
