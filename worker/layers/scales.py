"""Scales that are tensors of their own in a checkpoint, and a router of experts that has some (Gemma 4)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from worker.kernels.elementwise import RMS_NORM, NormSpec
from worker.layers.moe import Router
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup
from worker.layers.weighted import WeightedLayer, expect_shape
from worker.loader.checkpoint import LazyTensor, WeightTarget
from worker.loader.experts import ExpertsConfig


class Scales(WeightedLayer):
    """A vector whose name in the checkpoint is the layer's own."""

    def __init__(self, setup: LayerSetup, size: int, dtype: torch.dtype, factor: float = 1.0) -> None:
        """`factor`: of what the checkpoint has."""
        super().__init__()
        self._factor = factor
        self.numbers = torch.ones(size, dtype=dtype, device=setup.device).mul_(factor)

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {path: self._load}

    def weights(self) -> Iterable[Tensor]:
        return [self.numbers]

    def _load(self, tensor: LazyTensor) -> None:
        expect_shape(tensor, tuple(self.numbers.shape))
        self.numbers.copy_(tensor.read()).mul_(self._factor)


class ScaledRouter(Router):
    """Norms what experts get with weights of its own, and scales each expert's weight by a number of that expert."""

    def __init__(self, setup: LayerSetup, hidden_size: int, config: ExpertsConfig, eps: float) -> None:
        super().__init__(setup, hidden_size, config)
        self._norm = setup.kernels.choose(RMS_NORM, NormSpec(hidden_size, has_float32_weight=True), setup.dtype)
        self._eps = eps
        self.scale = Scales(setup, hidden_size, torch.float32, hidden_size**-0.5)
        self.per_expert_scale = Scales(setup, config.num_experts, torch.float32)

    def forward(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden, residual = norm.add_norm(x, residual)
        weights, ids = self.choose(self._norm.norm(residual, self.scale.numbers, self._eps))
        # Kernels that are compiled ahead leave the numbers undefined: they must not lead out of the table.
        scales = self.per_expert_scale.numbers
        return hidden, residual, weights * scales[ids.clamp(0, len(scales) - 1)], ids
