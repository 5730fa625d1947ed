"""Moves of cache entries. Conventions are those of `operation`."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from worker.kernels.operation import Operation


class MoveKernel(Protocol):
    """Entries of a cache: `tensor` has them in its first dimension; indices are int64 on the device."""

    def zero(self, tensor: Tensor, entries: Tensor) -> None: ...

    def copy(self, tensor: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """All reads before all writes."""

    def swap_out(self, tensor: Tensor, host: Tensor, entries: Tensor, host_entries: Sequence[int]) -> None:
        """To the host's tensor, which is ready once the device got there. Ordered after the work submitted before."""

    def swap_in(self, tensor: Tensor, host: Tensor, entries: Tensor, host_entries: Sequence[int]) -> None:
        """From the host's tensor, ordered after earlier `swap_out`s."""


MOVE_ENTRIES: Operation[None, MoveKernel] = Operation("move_entries")
