"""Logits of a driver's steps against those of `transformers`."""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runner.driver import Driver

TOLERANCE = 1e-4


def capture_logits(driver: Driver) -> list[Tensor]:
    """Every later step appends its logits, rows in the runner's order. Greedy ones have some for that, too."""
    driver.runner._find_greedy = None
    model = driver.runner._model
    plain, seen = model.logits, []

    def logits(hidden: Tensor) -> Tensor:
        seen.append(plain(hidden))
        return seen[-1]

    model.logits = logits  # type: ignore[method-assign]
    return seen


def reference(model: LlamaForCausalLM, tokens: list[int]) -> Tensor:
    """Logits after the last of `tokens`."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, -1]


def assert_logits(seen: Tensor, model: LlamaForCausalLM, tokens: list[int]) -> None:
    assert (seen - reference(model, tokens)).abs().max() < TOLERANCE
