"""Launches that differ in nothing but the memory of their tensors, such as those of a step's layers.

Triton asks for every launch anew which of a kernel's variants it wants, by the name and type of each argument: with
forty of them 60 to 90 µs, and a layer of a step that is not one graph has three such launches.
"""

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from worker.kernels.triton.ahead import ALIGNMENT


class Launches:
    """Of one step; or of a kernel for good, where no argument is a number that differs from step to step."""

    def __init__(self) -> None:
        self._made: dict[Hashable, CompiledKernel] = {}

    def __call__(self, kernel: JITFunction, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """As kernel[grid](*args, **options), of all parameters in their order."""
        # Where a parameter is a number it is never anything else, so that types need not be compared.
        kinds = [(arg.dtype, arg.data_ptr() % ALIGNMENT) if isinstance(arg, Tensor) else arg for arg in args]
        key = (kernel, *kinds, *options.values())
        made = self._made.get(key)
        if made is not None:
            made[grid + (1,) * (3 - len(grid))](*args)
            return
        made = kernel[grid](*args, **options)
        if made is not None:  # neither interpreted nor rehearsed
            self._made[key] = made
