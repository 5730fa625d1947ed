"""Qwen2ForCausalLM: Qwen2 and Qwen2.5, with biases of queries, keys and values."""

from worker.models.dense import DenseForCausalLM


class Qwen2ForCausalLM(DenseForCausalLM):
    """As it is."""
