"""Norms and activations of AITER."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.kernels.aiter.package import Need, required
from worker.kernels.aiter.reduce import PeerReduce
from worker.kernels.elementwise import GatedActivationKernel, RmsNormKernel
from worker.parallel.group import Group

TRITON_RMS_NORM = "aiter.ops.triton.rmsnorm"


class NativeRmsNorm(RmsNormKernel):
    """HIP and CK. The sum over ranks goes through AITER's own all-reduce where that can do it."""

    NEEDS: ClassVar[tuple[Need, ...]] = (("aiter", "rms_norm"), ("aiter", "fused_add_rms_norm_cu"))

    def __init__(self, device: torch.device) -> None:
        self._norm = required("aiter", "rms_norm")
        # In place by its contract; those that take two residuals may read one again after they wrote the other.
        self._add_norm = required("aiter", "fused_add_rms_norm_cu")
        self._reduce = PeerReduce(device)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rows(self._norm, x, weight, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Group) -> tuple[Tensor, Tensor]:
        x = self._reduce(x.contiguous(), group)
        self._add_norm(x, residual, weight, eps)
        return x, residual


class TritonRmsNorm(RmsNormKernel):
    NEEDS: ClassVar[tuple[Need, ...]] = ((TRITON_RMS_NORM, "rms_norm"), (TRITON_RMS_NORM, "rmsnorm2d_fwd_with_add"))

    def __init__(self) -> None:
        self._norm = required(TRITON_RMS_NORM, "rms_norm")
        self._add_norm = required(TRITON_RMS_NORM, "rmsnorm2d_fwd_with_add")

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rows(self._norm, x, weight, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Group) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        self._add_norm(out, group.all_reduce(x), residual, residual, weight, eps)
        return out, residual


def norm_rows(norm: Callable[..., Any], x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """AITER's norms take rows, [R, N], and a weight of their dtype."""
    rows: Tensor = norm(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), eps)
    return rows.view(x.shape)


class NativeSiluAndMul(GatedActivationKernel):
    NEEDS: ClassVar[tuple[Need, ...]] = (("aiter", "silu_and_mul"),)

    def __init__(self) -> None:
        self._silu_and_mul = required("aiter", "silu_and_mul")

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        self._silu_and_mul(out, x)
        return out
