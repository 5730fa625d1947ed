"""Gated DeltaNet layers: the builder of their per-request state, a group of one entry in each layer; blocks they have
none."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.attention.interface import CacheBuilder, EntryTensor
from worker.core.cache.pools import PoolKind, PoolPlan, PoolSpec
from worker.kernels.delta import DELTA, DeltaSpec, DeltaState
from worker.kernels.select import Kernels
from worker.kernels.step import Step, StepBuffers


@dataclass(frozen=True, slots=True)
class DeltaCacheSpec:
    shape: DeltaSpec

    def make_builder(self, layers: Sequence[Any], number: int, kernels: Kernels, block_size: int) -> CacheBuilder:
        return DeltaBuilder(self.shape, layers, number, kernels)


class DeltaLayer(Protocol):
    def bind(self, number: int, state: DeltaState) -> None:
        """`number`: of the builder, which owns the state."""


class DeltaBuilder:
    def __init__(self, shape: DeltaSpec, layers: Sequence[DeltaLayer], number: int, kernels: Kernels) -> None:
        self._shape, self._layers, self._number = shape, layers, number
        self._kernel = kernels.choose(DELTA, shape, shape.dtype)
        self._device = kernels.device
        self._states: list[DeltaState] = []
        self._lengths = torch.empty(0, dtype=torch.int64)
        """[groups + 1]: tokens of its request that a group's recurrent states have taken in."""

    def pool_specs(self) -> list[PoolSpec]:
        """The one pool: a group of this rank, all layers."""
        of_layer = DeltaState.zeros(self._shape, 1, torch.device("meta"))
        num_bytes = len(self._layers) * sum(tensor.nbytes for tensor in of_layer.tensors)
        if self._shape.num_drafts:
            num_bytes += self._lengths.itemsize
        return [PoolSpec(PoolKind.STATE, num_bytes, entries_per_request=1)]

    def allocate(self, plan: PoolPlan) -> None:
        num_groups = plan.num_groups + 1
        self._states = [DeltaState.zeros(self._shape, num_groups, self._device) for _ in self._layers]
        self._lengths = torch.zeros(num_groups, dtype=torch.int64, device=self._device)
        for layer, state in zip(self._layers, self._states, strict=True):
            layer.bind(self._number, state)

    def entry_tensors(self) -> list[EntryTensor]:
        tensors = [tensor for state in self._states for tensor in state.tensors]
        if self._shape.num_drafts:
            tensors.append(self._lengths)
        return [EntryTensor(PoolKind.STATE, tensor) for tensor in tensors]

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return self._kernel.graph_contexts(num_rows, max_context_len)

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        return self._kernel.all_steps(max_rows, max_tokens, max_context_len)

    def prepare(self, step: Step, buffers: StepBuffers) -> Any:
        lag = self._catch_up(step, buffers) if self._shape.num_drafts else None
        return self._kernel.prepare(step, buffers, lag)

    def _catch_up(self, step: Step, buffers: StepBuffers) -> Tensor:
        """The rows' `lag`, see `DeltaKernel.prepare`; and how far their groups will be when the step is over.

        A row begins where the last one's tokens stop to count, whatever it had tried: so its place tells which of those
        in the log were right.
        """
        groups, starts = buffers.groups[: step.num_rows], buffers.query_starts[: step.num_rows + 1]
        num_tokens = starts.diff()
        positions = buffers.positions.index_select(0, starts[:-1])
        most = self._shape.most_tentative
        # Of rows that are nobody's it may be any number.
        lag = (positions - self._lengths.index_select(0, groups)).clamp_(0, most)
        is_tentative = (num_tokens > 1) & (num_tokens <= most)
        self._lengths.index_copy_(0, groups, positions + num_tokens.masked_fill(is_tentative, 0))
        return lag
