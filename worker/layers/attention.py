"""Attention layers over a cache that a builder owns."""

import torch
from torch import Tensor

from worker.attention.context import current_context
from worker.attention.gqa import GqaCacheSpec
from worker.attention.interface import CacheLayer
from worker.kernels.interface import GQA, GqaCache, GqaSpec, QkNorm, RopeTable
from worker.layers.setup import LayerSetup


class GqaAttention(CacheLayer):
    """Causal attention over the paged cache, this rank's heads. `sinks` where the shape has them: [H]."""

    def __init__(
        self,
        setup: LayerSetup,
        shape: GqaSpec,
        norm: QkNorm | None,
        rope: RopeTable | None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(GqaCacheSpec(shape), shape.num_heads * shape.head_dim)
        self._kernel = setup.kernels.choose(GQA, shape, setup.dtype)
        self._norm, self._rope, self._sinks = norm, rope, sinks
        self._number = 0
        self._cache = GqaCache(torch.empty(0), torch.empty(0))

    def bind(self, number: int, cache: GqaCache) -> None:
        """`number`: of the builder, which owns the cache."""
        self._number, self._cache = number, cache

    def attend(self, qkv: Tensor) -> Tensor:
        """[T, (H + 2K) × D] → [T, H × D]."""
        metadata = current_context().metadata[self._number]
        q, k, v = self._kernel.write_qkv(qkv, self._norm, self._rope, self._cache, metadata)
        return self._kernel.attend(q, k, v, self._cache, metadata, self._sinks)
