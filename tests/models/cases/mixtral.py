"""Mixtral."""

from transformers import MixtralConfig, MixtralForCausalLM

from tests.models.cases import SMALL

MIXTRAL = SMALL | {"num_local_experts": 6, "num_experts_per_tok": 2}
ATTENTION = "GQA, a window"
CASES = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**MIXTRAL)),
    "mixtral-window": lambda: MixtralForCausalLM(MixtralConfig(**MIXTRAL | {"sliding_window": 20})),
}
