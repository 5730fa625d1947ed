"""What a Qwen3-Next's config.json says: gated DeltaNet in most layers, gated attention in the others."""

from dataclasses import dataclass

from worker.loader.config import MAX_CONTEXT, MAX_SIZE
from worker.loader.experts import ExpertsConfig
from worker.loader.families.dense import FULL, dense_config, extended
from worker.loader.families.moe import MoeConfig, qwen_dense_layers
from worker.loader.families.mtp import MTP_NAMES
from worker.loader.fields import Fields
from worker.loader.hf_rope import hf_partial_rope

LINEAR = "linear_attention"
DEFAULT_INTERVAL, DEFAULT_HEAD_DIM, DEFAULT_ROTARY_FACTOR = 4, 256, 0.25
"""What `transformers` takes where the fields are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Of gated DeltaNet; `worker.layers.delta.DeltaShape` has what the names mean."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(MoeConfig):
    delta: DeltaConfig
    linear_layers: frozenset[int]
    """Those with gated DeltaNet; the others have gated attention."""


def qwen3_next_config(fields: Fields) -> HybridConfig:
    """Raises ModelConfigError."""
    base = hybrid_config(fields, "Qwen3NextForCausalLM", "qwen3_next")
    return extended(
        base,
        HybridConfig,
        experts=hybrid_experts(fields, is_normalised=fields.flag("norm_topk_prob", True)),
        dense_layers=qwen_dense_layers(fields, base.num_layers),
    )


def hybrid_config(fields: Fields, architecture: str, model_type: str, *, has_mlp: bool = True) -> HybridConfig:
    """All but the experts; `has_mlp`: see `dense_config`. Raises ModelConfigError."""
    fields.expect("use_sliding_window", False)
    fields.ignore("sliding_window", "max_window_layers")
    max_model_len = fields.integer("max_position_embeddings", most=MAX_CONTEXT)
    rope = hf_partial_rope(fields, max_model_len, DEFAULT_ROTARY_FACTOR)
    base = dense_config(fields, architecture, model_type, rope=rope, has_mlp=has_mlp)
    return extended(
        base,
        HybridConfig,
        delta=_delta(fields),
        linear_layers=_linear_layers(fields, base.num_layers),
        head_dim=base.head_dim if "head_dim" in fields else DEFAULT_HEAD_DIM,
        attention_bias=fields.flag("attention_bias", False),
        skipped_weights=MTP_NAMES,
    )


def hybrid_experts(fields: Fields, *, is_normalised: bool) -> ExpertsConfig:
    """Routed ones, and a shared one behind a gate. Raises ModelConfigError."""
    fields.expect("output_router_logits", False)
    fields.ignore("router_aux_loss_coef")
    num_experts = fields.integer("num_experts", most=MAX_SIZE)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", most=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", most=MAX_SIZE),
        is_normalised=is_normalised,
        shared_size=fields.integer("shared_expert_intermediate_size", most=MAX_SIZE),
        has_shared_gate=True,
    )


def _delta(fields: Fields) -> DeltaConfig:
    num_key_heads = fields.integer("linear_num_key_heads", most=MAX_SIZE)
    num_value_heads = fields.integer("linear_num_value_heads", most=MAX_SIZE)
    if num_value_heads % num_key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of the {num_key_heads} linear_num_key_heads")
    return DeltaConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.integer("linear_key_head_dim", most=MAX_SIZE),
        value_dim=fields.integer("linear_value_head_dim", most=MAX_SIZE),
        width=fields.integer("linear_conv_kernel_dim", least=2, most=MAX_SIZE),
    )


def _linear_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """`full_attention_interval` counts where there is no `layer_types`."""
    interval = fields.integer("full_attention_interval", DEFAULT_INTERVAL)
    types = fields.texts("layer_types", [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)])
    if len(types) != num_layers or set(types) - {LINEAR, FULL}:
        raise fields.error("layer_types", f"{LINEAR} or {FULL} for each of the {num_layers} layers")
    if FULL not in types:
        raise fields.error("layer_types", f"{FULL} in at least one layer")
    return frozenset(i for i, kind in enumerate(types) if kind == LINEAR)
