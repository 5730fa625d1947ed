"""Multi-head latent attention: the builder of its paged cache, and of the index's keys where there is one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from worker.attention.interface import CacheBuilder, EntryTensor
from worker.core.cache.pools import PoolKind, PoolPlan, PoolSpec
from worker.kernels.mla import INDEX, MLA, IndexSpec, MlaMetadata, MlaSpec
from worker.kernels.select import Kernels
from worker.kernels.step import Step, StepBuffers


@dataclass(frozen=True, slots=True)
class MlaCacheSpec:
    shape: MlaSpec
    index: IndexSpec | None = None

    def make_builder(self, layers: Sequence[Any], number: int, kernels: Kernels, block_size: int) -> CacheBuilder:
        if self.index is None:
            return MlaBuilder(self.shape, layers, number, kernels, block_size)
        return IndexedMlaBuilder(self.shape, self.index, layers, number, kernels, block_size)


class MlaLayer(Protocol):
    def bind(self, number: int, cache: Tensor, index_cache: Tensor | None) -> None:
        """`number`: of the builder, which owns the caches."""


@dataclass(frozen=True, slots=True)
class IndexedMetadata:
    attention: MlaMetadata
    index: Any


class MlaBuilder:
    def __init__(
        self, shape: MlaSpec, layers: Sequence[MlaLayer], number: int, kernels: Kernels, block_size: int
    ) -> None:
        self._shape, self._layers, self._number, self._block_size = shape, layers, number, block_size
        self._kernel = kernels.choose(MLA, shape, shape.dtype)
        self._device = kernels.device
        self._entries: list[Tensor] = []

    def pool_specs(self) -> list[PoolSpec]:
        """A block of all layers: a row of each token, whatever the number of ranks."""
        values = len(self._layers) * self._block_size * self._shape.row_dim
        return [PoolSpec(PoolKind.PAGE, values * self._shape.dtype.itemsize)]

    def allocate(self, plan: PoolPlan) -> None:
        pool = self._kernel.allocate(len(self._layers), plan.num_blocks + 1, self._block_size, self._device)
        self._entries = pool.entries
        for layer, cache in zip(self._layers, pool.layers, strict=True):
            layer.bind(self._number, cache, None)

    def entry_tensors(self) -> list[EntryTensor]:
        return [EntryTensor(PoolKind.PAGE, tensor) for tensor in self._entries]

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return self._kernel.graph_contexts(num_rows, max_context_len)

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        return self._kernel.all_steps(max_rows, max_tokens, max_context_len)

    def prepare(self, step: Step, buffers: StepBuffers) -> Any:
        return self._kernel.prepare(step, buffers, self._block_size)


class IndexedMlaBuilder(MlaBuilder):
    """Blocks hold the index's keys, too, in a tensor of their own."""

    def __init__(
        self, shape: MlaSpec, index: IndexSpec, layers: Sequence[MlaLayer], number: int, kernels: Kernels,
        block_size: int,
    ) -> None:  # fmt: skip
        super().__init__(shape, layers, number, kernels, block_size)
        self._index_spec = index
        self._index = kernels.choose(INDEX, index, index.dtype)

    def pool_specs(self) -> list[PoolSpec]:
        values = len(self._layers) * self._block_size * self._index_spec.head_dim
        return [*super().pool_specs(), PoolSpec(PoolKind.PAGE, values * self._index_spec.dtype.itemsize)]

    def allocate(self, plan: PoolPlan) -> None:
        counts = (len(self._layers), plan.num_blocks + 1, self._block_size, self._device)
        pool, index_pool = self._kernel.allocate(*counts), self._index.allocate(*counts)
        self._entries = [*pool.entries, *index_pool.entries]
        for layer, cache, index_cache in zip(self._layers, pool.layers, index_pool.layers, strict=True):
            layer.bind(self._number, cache, index_cache)

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        ours = super().graph_contexts(num_rows, max_context_len)
        index = self._index.graph_contexts(num_rows, max_context_len)
        return tuple(sorted({*ours, *index})) if ours and index else ()

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        yield from super().all_steps(max_rows, max_tokens, max_context_len)
        yield from self._index.all_steps(max_rows, max_tokens, max_context_len)

    def prepare(self, step: Step, buffers: StepBuffers) -> IndexedMetadata:
        return IndexedMetadata(super().prepare(step, buffers), self._index.prepare(step, buffers, self._block_size))
