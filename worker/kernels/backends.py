"""Which backends there are, in order of preference, and which of them can run on a device."""

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from types import ModuleType

import torch

from worker.kernels.operation import KernelBackendError

logger = logging.getLogger(__name__)

PREFERRED = ("aiter", "triton", "native", "torch")
BACKENDS = ("auto", *PREFERRED)


def usable_backends(backend: str, device: torch.device) -> list[ModuleType]:
    """All that can run on `device`: `backend` first, unless it is `auto`. Each has IMPLEMENTATIONS and COMPILER.

    Raises KernelBackendError for a backend that cannot, or that nobody knows.
    """
    if backend not in BACKENDS:
        raise KernelBackendError(f"unknown kernel backend {backend!r}; known: {', '.join(BACKENDS)}")
    # On a CPU, kernels for GPUs are interpreted: where they were asked for and nowhere else.
    wanted = ("native", "torch") if backend == "auto" else (backend, "torch")
    candidates = [name for name in PREFERRED if device.type != "cpu" or name in wanted]
    reasons = {name: _OBSTACLES[name](device) for name in candidates}
    if reasons.get(backend) is not None:
        raise KernelBackendError(
            f"kernel backend {backend!r} cannot run on {device.type} here: {reasons[backend]}; use 'torch' or 'auto'"
        )
    if backend == "auto" and torch.version.hip is not None and device.type != "cpu" and reasons["aiter"] is not None:
        logger.warning("an AMD GPU without AITER's kernels is slow: %s", reasons["aiter"])
    if backend == "auto" and device.type == "cpu" and reasons["native"] is not None:
        logger.warning("no native kernels here, torch's take about twice as long: %s", reasons["native"])
    usable = [name for name in candidates if reasons[name] is None]
    usable.sort(key=lambda name: name != backend)
    return [importlib.import_module(f"worker.kernels.{name}") for name in usable]


def _no_triton(device: torch.device) -> str | None:
    """Why Triton cannot compile for `device`; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed (builds of torch for NVIDIA GPUs bring it)"
    if device.type == "cpu":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else "Triton's kernels need an NVIDIA GPU"
    if torch.version.hip is not None:
        return "this backend is tuned for NVIDIA GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or newer"
    return None


def _no_aiter(device: torch.device) -> str | None:
    # Not at the top: it would load the backend's table on machines that have no use for it.
    from worker.kernels.aiter.package import obstacle

    return obstacle(device)


def _no_native(device: torch.device) -> str | None:
    if device.type != "cpu":
        return "its kernels are for CPUs"
    from worker.kernels.native.library import obstacle  # as above

    return obstacle()


_OBSTACLES: dict[str, Callable[[torch.device], str | None]] = {
    "aiter": _no_aiter,
    "triton": _no_triton,
    "native": _no_native,
    "torch": lambda _: None,
}
