"""Attention over K and V of every head (MHA, GQA, MQA): the builder of its paged cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.attention.interface import CacheBuilder, EntryTensor
from worker.core.cache.pools import PoolKind, PoolPlan, PoolSpec
from worker.kernels.gqa import GQA, GqaCache, GqaSpec
from worker.kernels.select import Kernels
from worker.kernels.step import Step, StepBuffers


@dataclass(frozen=True, slots=True)
class GqaCacheSpec:
    shape: GqaSpec
    dtype: torch.dtype
    """Of activations."""

    def make_builder(self, layers: Sequence[Any], number: int, kernels: Kernels, block_size: int) -> CacheBuilder:
        return GqaBuilder(self, layers, number, kernels, block_size)


class GqaLayer(Protocol):
    def bind(self, number: int, cache: GqaCache) -> None:
        """`number`: of the builder, which owns the cache."""


class GqaBuilder:
    def __init__(
        self, spec: GqaCacheSpec, layers: Sequence[GqaLayer], number: int, kernels: Kernels, block_size: int
    ) -> None:
        self._shape, self._layers, self._number, self._block_size = spec.shape, layers, number, block_size
        self._kernel = kernels.choose(GQA, spec.shape, spec.dtype)
        self._device = kernels.device
        self._entries: list[Tensor] = []

    def pool_specs(self) -> list[PoolSpec]:
        """The one pool: blocks of this rank, all layers, K and V."""
        shape = self._shape
        return [PoolSpec(PoolKind.PAGE, len(self._layers) * self._block_size * shape.token_bytes)]

    def allocate(self, plan: PoolPlan) -> None:
        pool = self._kernel.allocate(len(self._layers), plan.num_blocks + 1, self._block_size, self._device)
        # Float8 as bytes: whoever moves entries knows no such numbers.
        self._entries = [x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in pool.entries]
        for layer, cache in zip(self._layers, pool.layers, strict=True):
            layer.bind(self._number, cache)

    def entry_tensors(self) -> list[EntryTensor]:
        return [EntryTensor(PoolKind.PAGE, tensor) for tensor in self._entries]

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return self._kernel.graph_contexts(num_rows, max_context_len)

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        return self._kernel.all_steps(max_rows, max_tokens, max_context_len)

    def prepare(self, step: Step, buffers: StepBuffers) -> Any:
        return self._kernel.prepare(step, buffers, self._block_size)
