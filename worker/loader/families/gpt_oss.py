"""What a GPT-OSS's config.json says."""

from dataclasses import dataclass

from worker.loader.config import MAX_SIZE, ModelConfig
from worker.loader.experts import ExpertsConfig
from worker.loader.families.dense import FULL, SLIDING, dense_config, extended, layer_types, layer_windows
from worker.loader.fields import Fields

DEFAULT_ALPHA, DEFAULT_LIMIT = 1.702, 7.0
"""Of the experts' activation, which OpenAI's files leave out in part; what `transformers` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(ModelConfig):
    experts: ExpertsConfig


def gpt_oss_config(fields: Fields) -> GptOssConfig:
    """Raises ModelConfigError."""
    fields.expect("output_router_logits", False)
    fields.ignore("router_aux_loss_coef")
    base = dense_config(fields, "GptOssForCausalLM", "gpt_oss")
    if base.rope.yarn is not None:
        fields.expect("initial_context_length", base.rope.yarn.original_max_position)
    types = layer_types(fields, base.num_layers, [FULL if i % 2 else SLIDING for i in range(base.num_layers)])
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    return extended(
        base,
        GptOssConfig,
        attention_bias=fields.flag("attention_bias", True),
        windows=layer_windows(fields, types, window, base.max_model_len),
        experts=_experts(fields, base.intermediate_size),
    )


def _experts(fields: Fields, intermediate_size: int) -> ExpertsConfig:
    num_experts = fields.integer("num_local_experts", most=MAX_SIZE)
    fields.expect("num_experts", num_experts)
    top_k = fields.integer("num_experts_per_tok", most=num_experts)
    fields.expect("experts_per_token", top_k)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=intermediate_size,
        has_bias=True,
        swiglu_alpha=fields.number("swiglu_alpha", DEFAULT_ALPHA),
        swiglu_limit=fields.number("swiglu_limit", DEFAULT_LIMIT),
    )
