"""Sampling parameters as tensors, a row a slot or a sampled row; packed, so that rows are chosen in two operations."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.core.batch import NewSequence

NUM_INTEGERS, NUM_FLOATS = 3, 6

PackedIntegers = list[tuple[int, int, int]]
PackedFloats = list[tuple[float, float, float, float, float, float]]


def pack(news: Iterable[NewSequence]) -> tuple[PackedIntegers, PackedFloats]:
    """The columns of `Parameters`, in their order. A seed has 64 bits without a sign."""
    integers, floats = [], []
    for new in news:
        p = new.sampling
        integers.append((p.top_k, p.seed, new.num_prompt_tokens))
        floats.append((p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty))
    return integers, floats


@dataclass(frozen=True, slots=True)
class Parameters:
    """Each a column [R, 1], a view."""

    integers: Tensor
    """int64 [R, 3]"""
    floats: Tensor
    """float64 [R, 6]"""

    @classmethod
    def neutral(cls, num_rows: int, device: torch.device) -> "Parameters":
        """Draw from the model's own distribution."""
        floats = torch.zeros(num_rows, NUM_FLOATS, dtype=torch.float64, device=device)
        parameters = cls(torch.zeros(num_rows, NUM_INTEGERS, dtype=torch.int64, device=device), floats)
        for column in (parameters.temperature, parameters.top_p, parameters.repetition_penalty):
            column.fill_(1)
        return parameters

    def select(self, rows: Tensor) -> "Parameters":
        """A copy of these rows, int64 [R]."""
        return Parameters(self.integers.index_select(0, rows), self.floats.index_select(0, rows))

    @property
    def top_k(self) -> Tensor:
        """0 for all."""
        return self.integers[:, 0:1]

    @property
    def seed(self) -> Tensor:
        return self.integers[:, 1:2]

    @property
    def num_prompt_tokens(self) -> Tensor:
        return self.integers[:, 2:3]

    @property
    def temperature(self) -> Tensor:
        return self.floats[:, 0:1]

    @property
    def top_p(self) -> Tensor:
        return self.floats[:, 1:2]

    @property
    def min_p(self) -> Tensor:
        return self.floats[:, 2:3]

    @property
    def presence_penalty(self) -> Tensor:
        return self.floats[:, 3:4]

    @property
    def frequency_penalty(self) -> Tensor:
        return self.floats[:, 4:5]

    @property
    def repetition_penalty(self) -> Tensor:
        return self.floats[:, 5:6]
