"""Qwen3."""

from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.models.cases import SMALL

ATTENTION = "GQA"
CASES = {
    # Wide enough for the kernels that a CPU has of its own.
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL | {"intermediate_size": 96})),
    "qwen3-biases": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL | {"attention_bias": True, "head_dim": 8})),
}
