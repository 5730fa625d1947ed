"""Rotary tables as AITER reads them: cosines and sines of one half of a head, the other half's being the same."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.elementwise import RopeTable


@dataclass(frozen=True, slots=True)
class HalfTable:
    source: RopeTable
    """Kept, so that its identity stays its own."""
    cos: Tensor
    """[positions, D / 2]"""
    sin: Tensor
    both: Tensor
    """[positions, D]: cosines, then sines."""


class HalfTables:
    """One for each table of a model, made when a layer first asks for it."""

    def __init__(self) -> None:
        self._tables: dict[int, HalfTable] = {}

    def of(self, rope: RopeTable) -> HalfTable:
        if id(rope) not in self._tables:
            half = rope.cos.shape[1] // 2
            cos, sin = rope.cos[:, :half].contiguous(), rope.sin[:, half:].contiguous()
            self._tables[id(rope)] = HalfTable(rope, cos, sin, torch.cat((cos, sin), 1))
        return self._tables[id(rope)]
