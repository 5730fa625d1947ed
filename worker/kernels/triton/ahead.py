"""Kernels compiled together, in threads, before the first step needs them one after another.

A rehearsal launches what steps will launch, on tensors of which nothing but address, dtype and strides matter: each
launch that Triton has not seen goes to a thread, which compiles the kernel, or finds it on disk, and loads it; nothing
runs on the device. Most of a compilation is done without Python's lock, or in a process of its own.
"""

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""Bytes: of an address, all that Triton may compile in."""


class CompileAhead:
    """For one device. Used once."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        self._device, self.num_threads = device, num_threads
        self._seen: set[Hashable] = set()
        self._loading: _Loading | None = None

    @property
    def num_kernels(self) -> int:
        """That were made ready."""
        return 0 if self._loading is None else len(self._loading.futures)

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        """Around rehearsals; ends when all of their kernels are there. One that cannot be compiled is left for its
        first launch, which says why. Kernels that are compiled later are logged: somebody waited for each."""
        knobs.runtime.jit_post_compile_hook = None
        with ThreadPoolExecutor(self.num_threads, "kernels", self._use_device) as pool:
            self._loading = _Loading(pool)
            with triton.AsyncCompileMode(self._loading, ignore_errors=True):
                yield
        knobs.runtime.jit_post_compile_hook = _log_late

    def _use_device(self) -> None:
        """A thread begins on the first device."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Launches within come to nothing but kernels."""
        launch = JITFunction.run

        def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            # Layers are alike: most launches were seen before.
            key = (id(kernel), *map(_kind, args), *((name, _kind(value)) for name, value in options.items()))
            if key not in self._seen:
                self._seen.add(key)
                launch(kernel, *args, grid=grid, warmup=True, **options)

        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch


def _log_late(*, repr: str, **_: object) -> None:
    logger.warning("a kernel was not made ready ahead, and held up a step: %s", repr)


def _kind(argument: Any) -> Hashable:
    """Equal for arguments that make no two kernels of one."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    return type(argument), argument


class _Loading(Executor):
    """What is compiled is loaded in the same thread, too: launching then takes no time at all."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self.futures: list[Future[Any]] = []

    def submit(self, compile_kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.futures.append(self._pool.submit(_loaded, compile_kernel, *args, **kwargs))
        return self.futures[-1]


def _loaded(compile_kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kernel = compile_kernel(*args, **kwargs)
    _ = kernel.run  # makes its launcher and loads it, if that was not done
    return kernel
