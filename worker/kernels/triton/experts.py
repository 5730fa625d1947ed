"""Experts of a rank: few rows by pairs, more in tiles of sorted pairs. See `ExpertsKernel`."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker.kernels.moe_provisional import ExpertsSpec, ExpertWeights
from worker.kernels.triton.experts_grouped import GroupedTile, grouped_kernel, sum_kernel
from worker.kernels.triton.experts_pairs import PairTile, down_kernel, gate_kernel
from worker.kernels.triton.experts_sort import SortedPairs, sort_pairs
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import launch_options

MOST_PAIR_ROWS = 8
"""Above, rows that share an expert are many enough to read its weights together."""
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """How steps of some number of tokens are computed in tiles."""

    gate: GroupedTile
    down: GroupedTile


class TritonExperts:
    """See `ExpertsKernel`."""

    def __init__(self, spec: ExpertsSpec, machine: Machine, dtype: torch.dtype) -> None:
        self._spec, self._machine, self._itemsize = spec, machine, dtype.itemsize
        self._choices = triton.next_power_of_2(spec.top_k)

    def pack(self, weights: ExpertWeights) -> ExpertWeights:
        return weights

    def __call__(
        self, x: Tensor, weights: Tensor, ids: Tensor, packed: ExpertWeights, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        if 0 < len(x) <= MOST_PAIR_ROWS:
            self.by_pairs(x, weights, ids, packed, out, *self._pair_tiles)
        elif len(x):
            self.by_tiles(x, weights, ids, packed, out, *self._tiles(len(x)))
        return out

    def by_pairs(
        self, x: Tensor, weights: Tensor, ids: Tensor, packed: ExpertWeights, out: Tensor, gate: PairTile,
        down: PairTile,
    ) -> None:  # fmt: skip
        spec, overlaps = self._spec, self._machine.overlaps(len(x))
        inner = x.new_empty(ids.numel(), spec.intermediate_size)
        gate_kernel[(ids.numel(), triton.cdiv(spec.intermediate_size, gate.features))](
            x, ids, packed.gate_up, packed.gate_up if packed.gate_up_bias is None else packed.gate_up_bias, inner, x.stride(0), spec.first_expert, spec.num_experts,
            spec.alpha, spec.limit, spec.intermediate_size, spec.hidden_size, spec.top_k, gate.features, gate.piece,
            spec.has_bias, spec.is_clamped, overlaps, num_warps=gate.num_warps, **launch_options(overlaps),
        )  # fmt: skip
        down_kernel[(len(x), triton.cdiv(spec.hidden_size, down.features))](
            inner, ids, weights, packed.down, packed.down if packed.down_bias is None else packed.down_bias, out, spec.first_expert, spec.num_experts,
            spec.hidden_size, spec.intermediate_size, spec.top_k, self._choices, down.features, down.piece,
            spec.has_bias, overlaps, num_warps=down.num_warps, **launch_options(overlaps),
        )  # fmt: skip

    def by_tiles(
        self, x: Tensor, weights: Tensor, ids: Tensor, packed: ExpertWeights, out: Tensor, gate: GroupedTile,
        down: GroupedTile,
    ) -> None:  # fmt: skip
        """Both tiles have the same number of rows."""
        spec, overlaps = self._spec, self._machine.overlaps(len(x))
        sorted_pairs = sort_pairs(ids, spec.first_expert, spec.num_experts, gate.rows, overlaps=overlaps)
        inner = x.new_empty(ids.numel(), spec.intermediate_size)
        self._product(x, sorted_pairs, packed.gate_up, packed.gate_up_bias, inner, gate, is_gated=True)
        results = x.new_empty(ids.numel(), spec.hidden_size)
        self._product(inner, sorted_pairs, packed.down, packed.down_bias, results, down, is_gated=False)
        sum_kernel[(len(x), triton.cdiv(spec.hidden_size, SUM_BLOCK))](
            results, ids, weights, out, spec.first_expert, spec.num_experts, spec.hidden_size, spec.top_k, SUM_BLOCK,
            overlaps, num_warps=4, **launch_options(overlaps),
        )  # fmt: skip

    def _product(
        self, x: Tensor, sorted_pairs: SortedPairs, weight: Tensor, bias: Tensor | None, out: Tensor,
        tile: GroupedTile, *, is_gated: bool,
    ) -> None:  # fmt: skip
        spec, overlaps = self._spec, self._machine.overlaps(len(x) if is_gated else len(x) // self._spec.top_k)
        num_outputs, num_inputs = out.shape[1], x.shape[1]
        num_tiles = len(sorted_pairs.tiles)
        num_columns = triton.cdiv(num_outputs * (1 + is_gated), tile.features)
        grouped_kernel[(num_tiles * num_columns,)](
            x, sorted_pairs.pairs, sorted_pairs.tiles, weight, weight if bias is None else bias, out, num_tiles,
            x.stride(0), spec.alpha, spec.limit, num_outputs, num_inputs, spec.top_k, tile.rows, tile.features,
            tile.piece, tile.num_stages, tile.band, num_inputs % tile.piece == 0, bias is not None, is_gated,
            spec.is_clamped, overlaps, num_warps=tile.num_warps, **launch_options(overlaps),
        )  # fmt: skip
