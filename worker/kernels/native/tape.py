"""A step's calls of the library, recorded once and made again: what a CUDA graph is to a GPU.

What leads to the calls is Python and torch, which is cold in every step: weights run through all caches meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from worker.kernels.native.library import Function

FINDING = (torch.empty, torch.empty_like, Tensor.new_empty)
"""Functions of torch that find memory."""
NO_WORK = (
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.__len__, Tensor.stride, Tensor.is_contiguous, Tensor.data_ptr,  # type: ignore[attr-defined]
)  # fmt: skip
"""Those that describe it, and compute nothing."""
VIEWS = (Tensor.__getitem__, Tensor.contiguous)
"""Those that compute nothing if what they give is their first argument's memory."""


class UnrecordableError(Exception):
    """A step has work of torch's in it."""


class Tape(TorchFunctionMode):
    """Calls and the memory that they read and write. Structs are copied, since who made them fills them in anew for
    each step; what they point to has to stay where it is. A `Graph` of the runner."""

    def __init__(self, free: list[Tensor]) -> None:
        """`free`: memory that other tapes use, too; what this one takes is no longer in the list."""
        super().__init__()
        self._free = free
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._memory: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FINDING and func not in NO_WORK and func not in VIEWS:
            raise UnrecordableError(f"{func} is torch's")
        found = func(*args, **(kwargs or {}))
        if func in FINDING:
            found = self._taken(found)
        if func in VIEWS and found.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            raise UnrecordableError(f"{func} copies")
        self._memory.append(found)
        return found

    def _taken(self, found: Tensor) -> Tensor:
        """Like it, in memory of others that is not much larger, if there is some: nobody has touched what was found."""
        size = found.numel()
        for at, free in enumerate(self._free):
            if free.dtype == found.dtype and size <= free.numel() <= 2 * size and found.is_contiguous():
                return self._free.pop(at)[:size].view(found.shape)
        return found

    def record(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        copies = (type(x).from_buffer_copy(x) if isinstance(x, Structure) else x for x in arguments)
        self._calls.append((function, tuple(copies)))

    def capture_end(self) -> None:
        Function.recorder = None
        self.__exit__(None, None, None)

    def replay(self) -> None:
        for function, arguments in self._calls:
            function(*arguments)


class Tapes:
    """A `GraphDevice` of the runner."""

    rehearses = False

    def __init__(self) -> None:
        self._last: Tape | None = None
        self._free: list[Tensor] = []
        """Each of one dimension."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """One thread of the process at a time. An UnrecordableError ends what it comes from."""
        try:
            yield
        except UnrecordableError:
            assert self._last is not None
            self._last.capture_end()
            raise

    def begin(self) -> Tape:
        """What torch would compute raises UnrecordableError from now on."""
        self._last = Tape(self._free)
        self._last.__enter__()
        Function.recorder = self._last
        return self._last

    def marks(self) -> None:
        """A step of a CPU is done when it was submitted."""

    def alias(self, tensor: Tensor) -> Tensor:
        """No tape has a use for a small part of large memory, so the largest are to be captured first."""
        self._free.append(tensor.view(-1))
        return tensor
