"""Rows that all ranks write side by side into memory of rank 0, as they compute them.

The stores of a product carry its rows there, so nothing is left to be sent when it ends. Of 64 rows of logits, NCCL's
gather and the copies around it take 70 µs (two H200s, a vocabulary of 151,936).
"""

from math import prod
from typing import Protocol

import torch
from torch import Tensor

MAX_ROWS = 64
"""Of a decode step whose products are ours; of more rows, computing takes longer than sending."""
BYTES = 32 << 20
"""Of `MAX_ROWS` rows of 262,144 tokens in 16 bits."""


class Signals(Protocol):
    """From each rank to each other one, one at a time, in the order of the device's work: torch's symmetric memory."""

    def put_signal(self, rank: int, /) -> None:
        """What this rank wrote before is there for whoever has waited for it."""

    def wait_signal(self, rank: int, /) -> None: ...


class Gathering:
    """What is gathered is valid on rank 0 until the next place is asked for. All ranks must ask alike."""

    def __init__(self, memory: Tensor, own: Tensor, signals: Signals, rank: int, size: int) -> None:
        """`memory`: bytes of rank 0, as this rank sees them. `own`: those of this rank, which live as long as this."""
        self._memory, self._own, self._signals, self._rank, self._size = memory, own, signals, rank, size
        self._rows: Tensor | None = None
        self._part: Tensor | None = None

    def place(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Where this rank writes its part of rows, [R, width]; None if there is no room. Rank 0 tells the others when
        it is done with what is there."""
        shape = num_rows, self._size * width
        num_bytes = prod(shape) * dtype.itemsize
        if not 0 < num_rows <= MAX_ROWS or num_bytes > self._memory.numel():
            return None
        if self._rank == 0:
            for other in range(1, self._size):
                self._signals.put_signal(other)
        else:
            self._signals.wait_signal(0)
        self._rows = self._memory[:num_bytes].view(dtype).view(shape)
        self._part = self._rows[:, self._rank * width : (self._rank + 1) * width]
        return self._part

    @property
    def is_open(self) -> bool:
        """Whether somebody has asked for a place, and what is there was not taken."""
        return self._part is not None

    def take(self, part: Tensor) -> Tensor | None:
        """[R, size × width] on rank 0, once all have written; None on the others. `part`: the place, filled."""
        assert part is self._part
        rows, self._rows, self._part = self._rows, None, None
        if self._rank != 0:
            self._signals.put_signal(0)
            return None
        for other in range(1, self._size):
            self._signals.wait_signal(other)
        return rows
