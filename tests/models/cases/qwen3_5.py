"""Qwen3.5 (text), dense and with experts."""

from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
)

from tests.models.cases import SMALL

# See `qwen3_next` for the epsilon, and for why these models are in float64.
TEXT = SMALL | {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "rms_norm_eps": 1e-3,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
    "num_position_embeddings": 16,
}  # fmt: skip
MOE = TEXT | {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32,
}  # fmt: skip
del MOE["intermediate_size"]


def dense() -> PreTrainedModel:
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True)
    return Qwen3_5ForConditionalGeneration(config).double()


def moe() -> PreTrainedModel:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**MOE, experts_implementation="eager")).double()


ATTENTION = "gated DeltaNet in most layers, gated GQA in the others"
CASES = {"qwen3.5": dense, "qwen3.5-moe": moe}
