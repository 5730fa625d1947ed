"""Tiny random models of each family, a file a family. Its docstring, which names the models, and `ATTENTION` are
columns of its row in the README; `CASES`: name → what makes a model of `transformers`."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

VOCABULARY = 99
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.3, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
"""What most configurations have. Weights are large, so that logits are far from each other."""


@dataclass(frozen=True)
class Family:
    models: str
    attention: str
    cases: dict[str, Callable[[], PreTrainedModel]]


def all_families() -> dict[str, Family]:
    """By the name of the file."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        family = importlib.import_module(f"{__name__}.{module.name}")
        found[module.name] = Family((family.__doc__ or module.name).rstrip("."), family.ATTENTION, family.CASES)
    return found


def all_cases() -> dict[str, Callable[[], PreTrainedModel]]:
    return {name: make for family in all_families().values() for name, make in family.cases.items()}
