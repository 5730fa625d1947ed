"""The kernel table: for each operation the implementations, in order of preference; the first that supports wins."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import torch

from worker.kernels.backends import KernelBackendError, implementations
from worker.kernels.interface import KernelT, Operation, SpecT

__all__ = ["Implementation", "KernelBackendError", "Kernels"]


@dataclass(frozen=True, slots=True)
class Implementation(Generic[SpecT, KernelT]):
    """One way to carry out an operation. Capability decides, never a clock: two machines of one kind compute alike."""

    operation: Operation[SpecT, KernelT]
    name: str
    supports: Callable[[SpecT, torch.device, torch.dtype], bool]
    make: Callable[[SpecT, torch.device, torch.dtype], KernelT]


class Kernels:
    """One rank's kernels. Asked when a layer is built; equal questions get the same kernel."""

    def __init__(self, device: torch.device, backend: str = "auto") -> None:
        """`backend` goes before the others where it supports an operation. Raises KernelBackendError."""
        self.device = device
        self._table: list[Implementation[Any, Any]] = implementations(backend, device)
        self._chosen: dict[tuple[Any, ...], tuple[str, Any]] = {}

    def choose(self, operation: Operation[SpecT, KernelT], spec: SpecT, dtype: torch.dtype) -> KernelT:
        """The kernel for this shape and dtype. Raises KernelBackendError if there is none."""
        kernel = self.find(operation, spec, dtype)
        if kernel is None:
            raise KernelBackendError(f"no kernel for {operation.name} {spec} in {dtype} on {self.device.type}")
        return kernel

    def find(self, operation: Operation[SpecT, KernelT], spec: SpecT, dtype: torch.dtype) -> KernelT | None:
        """As `choose`; None if there is none. For operations that few backends have, in place of several others."""
        key = (operation.name, spec, dtype)
        if key not in self._chosen:
            for implementation in self._table:
                if implementation.operation == operation and implementation.supports(spec, self.device, dtype):
                    self._chosen[key] = implementation.name, implementation.make(spec, self.device, dtype)
                    break
            else:
                return None
        kernel: KernelT = self._chosen[key][1]
        return kernel

    def describe(self) -> dict[str, str]:
        """Operation → what carries it out, of those chosen so far; for the start-up log."""
        names: dict[str, dict[str, None]] = {}
        for (operation, *_), (name, _) in self._chosen.items():
            names.setdefault(operation, {})[name] = None
        return {operation: ", ".join(found) for operation, found in names.items()}
