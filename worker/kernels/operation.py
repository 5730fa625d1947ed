"""What an operation is, and one way to carry it out: what each backend's table is made of.

The files beside this one have the contracts. Those of a backend's folder carry them out, under the same name where one
file is enough.

Conventions: T tokens of a step, R rows, H query heads, K key/value heads (H a multiple of K), D head_dim, V vocabulary.
Activations are contiguous in their last dimension and of the dtype that the kernel was chosen for, unless said. Unless
an operation says that it works in place, it returns a new tensor that the caller owns. No operation of a step reads a
device value on the host.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from worker.kernels.step import Step

SpecT = TypeVar("SpecT")
KernelT = TypeVar("KernelT")


class KernelBackendError(Exception):
    """The backend asked for cannot run here; the message says what can."""


@dataclass(frozen=True, slots=True)
class Operation(Generic[SpecT, KernelT]):
    """A row of the kernel table. `SpecT`: the shape that a kernel is chosen for, hashable; `KernelT`: its contract."""

    name: str


@dataclass(frozen=True, slots=True)
class Implementation(Generic[SpecT, KernelT]):
    """One way to carry out an operation. Capability decides, never a clock: two machines of one kind compute alike."""

    operation: Operation[SpecT, KernelT]
    name: str
    supports: Callable[[SpecT, torch.device, torch.dtype], bool]
    make: Callable[[SpecT, torch.device, torch.dtype], KernelT]


class KernelCompiler(Protocol):
    """Makes kernels ready before the first step needs them one after another."""

    @property
    def num_threads(self) -> int: ...

    @property
    def num_kernels(self) -> int:
        """Made ready, so far."""

    def threads(self) -> AbstractContextManager[None]:
        """Around rehearsals: ends when what they asked for is there."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Within, operations of the backend do nothing but ask for the kernels that they would launch: what they return
        is undefined. Torch's operations do what they always do."""


def always(*_: Any) -> bool:
    """`Implementation.supports` of what carries out all shapes everywhere."""
    return True


class CacheKernel(Protocol):
    """Base of the contracts of kernels over a cache. As it stands, of one that is neither captured nor compiled."""

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        """See `CacheBuilder.graph_contexts`."""
        return ()

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        """See `CacheBuilder.all_steps`."""
        return ()
