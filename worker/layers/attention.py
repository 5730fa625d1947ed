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
        self.norm, self.rope, self._sinks = norm, rope, sinks
        self.number = 0
        """Of the builder that owns the cache."""
        self.cache = GqaCache(torch.empty(0), torch.empty(0))

    def bind(self, number: int, cache: GqaCache) -> None:
        """`number`: of the builder, which owns the cache."""
        self.number, self.cache = number, cache

    def attend(self, qkv: Tensor) -> Tensor:
        """[T, (H + 2K) × D] → [T, H × D]."""
        metadata = current_context().metadata[self.number]
        q, k, v = self._kernel.write_qkv(qkv, self.norm, self.rope, self.cache, metadata)
        return self._kernel.attend(q, k, v, self.cache, metadata, self._sinks)
