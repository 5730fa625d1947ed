"""RMS norm, with the residual addition (and the sum over ranks before it) in one operation where the kernel can."""

from collections.abc import Iterable

import torch
from torch import Tensor

from worker.kernels.interface import RMS_NORM, NormSpec
from worker.layers.setup import LayerSetup
from worker.layers.weighted import WeightedLayer, expect_shape
from worker.loader.checkpoint import LazyTensor, WeightTarget


class RMSNorm(WeightedLayer):
    def __init__(self, setup: LayerSetup, size: int, eps: float) -> None:
        super().__init__()
        self._kernel = setup.kernels.choose(RMS_NORM, NormSpec(size), setup.dtype)
        self._tp, self.eps = setup.tp, eps
        self.weight = torch.ones(size, dtype=setup.dtype, device=setup.device)

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {f"{path}.weight": self._load}

    def weights(self) -> Iterable[Tensor]:
        return [self.weight]

    def _load(self, tensor: LazyTensor) -> None:
        expect_shape(tensor, tuple(self.weight.shape))
        self.weight.copy_(tensor.read())

    def forward(self, x: Tensor) -> Tensor:
        return self._kernel.norm(x, self.weight, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x); the residual is updated in place.

        x is this rank's part of a sum over the tensor-parallel ranks, as a `RowLinear` leaves it.
        """
        return self._kernel.add_norm(x, residual, self.weight, self.eps, self._tp)

    @property
    def is_of_one_rank(self) -> bool:
        """What is normed is complete: there are no parts to be added up."""
        return self._tp.size == 1
