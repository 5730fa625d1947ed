"""Llama 2, 3, SmolLM2, TinyLlama."""

from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.cases import SMALL

ATTENTION = "GQA"
CASES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama-biases": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    ),
}
