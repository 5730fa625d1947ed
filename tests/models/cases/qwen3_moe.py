"""Qwen3-MoE."""

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.models.cases import SMALL

QWEN3_MOE = SMALL | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
ATTENTION = "GQA"
CASES = {
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE | {"mlp_only_layers": [0]})),
    "qwen3-moe-window": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 20, "norm_topk_prob": False},
            attention_bias=True,
        )
    ),
}
