"""RMS norm, with the residual addition fused where the backend can."""

import torch
from torch import Tensor, nn

from worker.kernels.interface import KernelBackend
from worker.layers.linear import expect_shape
from worker.loader.checkpoint import LazyTensor, WeightTarget


class RMSNorm(nn.Module):
    def __init__(self, kernels: KernelBackend, size: int, eps: float) -> None:
        super().__init__()
        self._kernels, self._eps = kernels, eps
        self.weight = torch.ones(size, dtype=kernels.dtype, device=kernels.device)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return {f"{prefix}weight": self._load}

    def _load(self, tensor: LazyTensor) -> None:
        expect_shape(tensor, tuple(self.weight.shape))
        self.weight.copy_(tensor.read())

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x); the residual is updated in place."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self._eps)
