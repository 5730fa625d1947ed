"""LlamaForCausalLM: Llama 2 and 3, SmolLM2 and what shares their shape."""

from worker.models.dense import DenseForCausalLM


class LlamaForCausalLM(DenseForCausalLM):
    """As it is."""
