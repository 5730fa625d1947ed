"""MistralForCausalLM: a Llama without biases."""

from worker.models.dense import DenseForCausalLM


class MistralForCausalLM(DenseForCausalLM):
    """As it is."""
