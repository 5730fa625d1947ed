"""Chooses the kernel backend, once, at start."""

import importlib.metadata

import torch

from worker.kernels.interface import KernelBackend

BACKENDS = ("auto", "torch", "triton", "aiter")


class KernelBackendError(Exception):
    """The backend asked for cannot run here; the message says what can."""


def create_backend(name: str, device: torch.device, dtype: torch.dtype) -> KernelBackend:
    """The backend called `name` for this device and dtype; `auto` takes the best that is there.

    Raises KernelBackendError.
    """
    if name in ("auto", "torch"):
        from worker.kernels.torch.backend import TorchBackend

        return TorchBackend(device, dtype)
    if name == "triton":
        raise KernelBackendError("kernel backend 'triton' is not available in this version; use 'torch' or 'auto'")
    if name == "aiter":
        raise KernelBackendError(_why_no_aiter())
    raise KernelBackendError(f"unknown kernel backend {name!r}; known: {', '.join(BACKENDS)}")


def _why_no_aiter() -> str:
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    if "aiter" in installed and "amd-aiter" not in installed:
        return (
            "the installed package 'aiter' is an unrelated library of asynchronous iterators; "
            "AMD's kernels are the package 'amd-aiter': pip uninstall aiter && pip install amd-aiter"
        )
    return "kernel backend 'aiter' is not available in this version; use 'torch' or 'auto'"
