"""RMS norm, with the residual addition (and the sum over ranks before it) in one operation where the kernel can."""

from collections.abc import Iterable

import torch
from torch import Tensor

from worker.kernels.elementwise import RMS_NORM, NormSpec
from worker.layers.setup import LayerSetup
from worker.layers.weighted import WeightedLayer, expect_shape
from worker.loader.checkpoint import LazyTensor, WeightTarget
from worker.parallel.group import Group


class RMSNorm(WeightedLayer):
    """`is_offset`: the checkpoint holds the weight's difference from 1; their sum is kept in float32, or it would be
    rounded. `takes_parts`: what is added to a residual is this rank's part of a sum over the tensor-parallel ranks."""

    def __init__(
        self, setup: LayerSetup, size: int, eps: float, *, is_offset: bool = False, takes_parts: bool = True
    ) -> None:
        super().__init__()
        spec = NormSpec(size, has_float32_weight=is_offset)
        self._kernel = setup.kernels.choose(RMS_NORM, spec, setup.dtype)
        self._tp, self.eps, self._is_offset = setup.tp if takes_parts else Group(), eps, is_offset
        self.weight = torch.ones(size, dtype=torch.float32 if is_offset else setup.dtype, device=setup.device)

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {f"{path}.weight": self._load}

    def weights(self) -> Iterable[Tensor]:
        return [self.weight]

    def _load(self, tensor: LazyTensor) -> None:
        expect_shape(tensor, tuple(self.weight.shape))
        self.weight.copy_(tensor.read())
        if self._is_offset:
            self.weight.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → the same, which is new."""
        return self._kernel.norm(x, self.weight, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x); the residual is updated in place.

        x is as a `RowLinear` leaves it, or, where the norm does not take parts, complete.
        """
        return self._kernel.add_norm(x, residual, self.weight, self.eps, self._tp)

    @property
    def is_of_one_rank(self) -> bool:
        """What is normed is complete: there are no parts to be added up."""
        return self._tp.size == 1
