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

NO_WORK = (
    torch.empty, torch.empty_like, Tensor.new_empty,
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.__len__, Tensor.stride, Tensor.is_contiguous, Tensor.data_ptr,  # type: ignore[attr-defined]
)  # fmt: skip
"""Functions of torch that find or describe memory, and compute nothing."""
VIEWS = (Tensor.__getitem__, Tensor.contiguous)
"""Those that compute nothing if what they give is their first argument's memory."""


class UnrecordableError(Exception):
    """A step has work of torch's in it."""


class Tape(TorchFunctionMode):
    """Calls and the memory that they read and write. Structs are copied, since who made them fills them in anew for
    each step; what they point to has to stay where it is. A `Graph` of the runner."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._memory: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in NO_WORK and func not in VIEWS:
            raise UnrecordableError(f"{func} is torch's")
        found = func(*args, **(kwargs or {}))
        if func in VIEWS and found.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            raise UnrecordableError(f"{func} copies")
        self._memory.append(found)
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
        self._last = Tape()
        self._last.__enter__()
        Function.recorder = self._last
        return self._last

    def alias(self, tensor: Tensor) -> Tensor:
        """No other tape uses its memory."""
        return tensor
