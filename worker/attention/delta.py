"""Gated DeltaNet layers: the builder of their per-request state, the last inputs of the convolution and the recurrent
state. Both are groups of one entry a request in each layer; blocks they have none."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

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

    def pool_specs(self) -> list[PoolSpec]:
        """The one pool: a group of this rank, all layers."""
        shape = self._shape
        inputs = (shape.width - 1) * shape.num_channels * shape.dtype.itemsize
        recurrent = shape.value_size * shape.key_dim * torch.float32.itemsize
        return [PoolSpec(PoolKind.STATE, len(self._layers) * (inputs + recurrent), entries_per_request=1)]

    def allocate(self, plan: PoolPlan) -> None:
        shape, num_groups = self._shape, plan.num_groups + 1
        self._states = [
            DeltaState(
                torch.zeros(num_groups, shape.width - 1, shape.num_channels, dtype=shape.dtype, device=self._device),
                torch.zeros(num_groups, shape.num_value_heads, shape.key_dim, shape.value_dim, device=self._device),
            )
            for _ in self._layers
        ]
        for layer, state in zip(self._layers, self._states, strict=True):
            layer.bind(self._number, state)

    def entry_tensors(self) -> list[EntryTensor]:
        return [
            EntryTensor(PoolKind.STATE, tensor) for state in self._states for tensor in (state.inputs, state.recurrent)
        ]

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return (max_context_len,) if self._kernel.can_capture() else ()

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        return self._kernel.all_steps(max_rows, max_tokens, max_context_len)

    def prepare(self, step: Step, buffers: StepBuffers) -> Any:
        return self._kernel.prepare(step, buffers)
