"""Attention layers over a cache that a builder owns."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from worker.attention.context import current_context
from worker.attention.gqa import GqaCacheSpec
from worker.attention.interface import CacheLayer
from worker.kernels.elementwise import RopeTable
from worker.kernels.gqa import GQA, GqaCache, GqaSpec, QkNorm
from worker.layers.linear import shard_of
from worker.layers.setup import LayerSetup
from worker.layers.weighted import WeightedLayer, expect_shape, sibling
from worker.loader.checkpoint import LazyTensor, WeightTarget


class CacheScales(WeightedLayer):
    """What keys and values are divided by before they are written as float8: a number each, which checkpoints have
    beside the attention that this layer's is a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = 1.0, 1.0

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        attention = path.rpartition(".")[0]
        return {sibling(attention, "k_scale"): self._load_k, sibling(attention, "v_scale"): self._load_v}

    def weights(self) -> Iterable[Tensor]:
        return []

    def _load_k(self, tensor: LazyTensor) -> None:
        self.k = _positive_number(tensor)

    def _load_v(self, tensor: LazyTensor) -> None:
        self.v = _positive_number(tensor)


def _positive_number(tensor: LazyTensor) -> float:
    """Raises ValueError."""
    values = tensor.read().flatten().tolist()
    if len(values) != 1 or not 0 < values[0] < float("inf"):
        raise ValueError(f"it is {values[:4]}; one number above 0 is needed")
    return float(values[0])


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
        super().__init__(GqaCacheSpec(shape, setup.dtype), shape.num_heads * shape.value_dim)
        self._kernel = setup.kernels.choose(GQA, shape, setup.dtype)
        self.norm, self.rope, self._sinks = norm, rope, sinks
        self.number = 0
        """Of the builder that owns the cache."""
        self.cache = GqaCache(torch.empty(0), torch.empty(0))
        self.scales = CacheScales() if setup.has_cache_scales else None

    def bind(self, number: int, cache: GqaCache) -> None:
        """`number`: of the builder, which owns the cache."""
        if self.scales is not None:
            cache = replace(cache, k_scale=self.scales.k, v_scale=self.scales.v)
        self.number, self.cache = number, cache

    def attend(self, qkv: Tensor) -> Tensor:
        """[T, (H + K) × D + K × value_dim] → [T, H × value_dim]."""
        return self.attend_with(qkv, self.norm)

    def attend_with(self, qkv: Tensor, norm: QkNorm | None) -> Tensor:
        """For a layer that shares this one's cache and norms its queries in its own way."""
        metadata = current_context().metadata[self.number]
        mixed = self._kernel.write_and_attend(qkv, norm, self.rope, self.cache, metadata, self._sinks)
        if mixed is not None:
            return mixed
        q, k, v = self._kernel.write_qkv(qkv, norm, self.rope, self.cache, metadata)
        return self._kernel.attend(q, k, v, self.cache, metadata, self._sinks)


class SharedAttention(CacheLayer):
    """Attention of a layer with queries of its own over another's keys and values."""

    owns_cache = False

    def __init__(self, source: GqaAttention, norm: QkNorm | None) -> None:
        """`norm`: its own of queries, and that of the other's keys."""
        super().__init__(source.spec, source.output_size)
        self._source = (source,)  # in a tuple, as it is no part of this layer in the module tree
        self.norm = norm

    def attend(self, qkv: Tensor) -> Tensor:
        """As `GqaAttention.attend`, where keys and values are the other layer's, as they were given to it. They are
        written once more, over themselves: kernels norm and rotate all three in one operation."""
        (source,) = self._source
        return source.attend_with(qkv, self.norm)


class Sinks(WeightedLayer):
    """A logit of each head that is in the softmax's sum, with no value (arXiv 2309.17453); this rank's heads."""

    def __init__(self, setup: LayerSetup, num_heads: int) -> None:
        super().__init__()
        self._total = num_heads
        self._start, self._count = shard_of(num_heads, setup.tp, "sinks")
        self.logits = torch.zeros(self._count, dtype=setup.dtype, device=setup.device)

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {path: self._load}

    def weights(self) -> Iterable[Tensor]:
        return [self.logits]

    def _load(self, tensor: LazyTensor) -> None:
        expect_shape(tensor, (self._total,))
        self.logits.copy_(tensor.read(0, self._start, self._count))
