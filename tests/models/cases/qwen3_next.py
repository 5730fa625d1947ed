"""Qwen3-Next."""

from transformers import PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from tests.models.cases import SMALL

# The epsilon is large, since the norm of a head that found next to nothing would make rounding large, too.
NEXT = SMALL | {
    "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "rms_norm_eps": 1e-3,
}  # fmt: skip
DENSE_LAYERS = NEXT | {
    "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "mlp_only_layers": [1], "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "attention_bias": True,
    "norm_topk_prob": False, "tie_word_embeddings": True,
}  # fmt: skip


def make(config: dict[str, object]) -> PreTrainedModel:
    """In float64: `transformers` sums up decays in float32, and its logits are off by more than may be."""
    return Qwen3NextForCausalLM(Qwen3NextConfig(**config, experts_implementation="eager")).double()


ATTENTION = "gated DeltaNet in most layers, gated GQA in the others"
CASES = {"qwen3-next": lambda: make(NEXT), "qwen3-next-dense-layers": lambda: make(DENSE_LAYERS)}
