"""Mistral."""

from transformers import MistralConfig, MistralForCausalLM

from tests.models.cases import SMALL

ATTENTION = "GQA, a window"
CASES = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL | {"sliding_window": None})),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SMALL | {"sliding_window": 20})),
}
