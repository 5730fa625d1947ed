"""The kernel table: for each operation the implementations, in order of preference; the first that supports wins."""

from collections.abc import Callable
from typing import Any

import torch

from worker.kernels.backends import usable_backends
from worker.kernels.operation import Implementation, KernelBackendError, KernelCompiler, KernelT, Operation, SpecT


class Kernels:
    """One rank's kernels. Asked when a layer is built; equal questions get the same kernel."""

    def __init__(self, device: torch.device, backend: str = "auto") -> None:
        """`backend` goes before the others where it supports an operation. Raises KernelBackendError."""
        self.device = device
        backends = usable_backends(backend, device)
        self._table: list[Implementation[Any, Any]] = [entry for module in backends for entry in module.IMPLEMENTATIONS]
        self._compiler: Callable[[torch.device, int], KernelCompiler] | None = backends[0].COMPILER
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

    def compiler(self, num_threads: int) -> KernelCompiler | None:
        """Of the backend that goes first; None: it compiles nothing, or not for this device."""
        return None if self._compiler is None or self.device.type == "cpu" else self._compiler(self.device, num_threads)

    def describe(self) -> dict[str, str]:
        """Operation → what carries it out, of those chosen so far; for the start-up log."""
        names: dict[str, dict[str, None]] = {}
        for (operation, *_), (name, _) in self._chosen.items():
            names.setdefault(operation, {})[name] = None
        return {operation: ", ".join(found) for operation, found in names.items()}
