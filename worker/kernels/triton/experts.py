"""Experts of a rank: few rows by pairs, more in tiles of sorted pairs. See `ExpertsKernel`."""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from worker.kernels.experts import ClampedSwiglu, ExpertsKernel, ExpertsSpec, ExpertWeights
from worker.kernels.triton.experts_grouped import GroupedTile, grouped_kernel, sum_kernel
from worker.kernels.triton.experts_pairs import PairTile, down_kernel, gate_kernel
from worker.kernels.triton.experts_sort import SortedPairs, sort_pairs
from worker.kernels.triton.experts_tiles import MAX_PAIR_ROWS, Tiles, down_pair_tile, gate_pair_tile, tiles_of
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import launch_options
from worker.kernels.triton.weight_tile import INPUTS, PLAIN, PackedGrouped, pack_grouped
from worker.kernels.weights import Dense, Grouped, Weight, power_of_two_in

Packed = tuple[Dense | PackedGrouped, Dense | PackedGrouped]
"""Gates and ups, downs."""
NOT_CLAMPED = ClampedSwiglu(alpha=1.0, limit=1.0)
"""Nobody reads them."""
SUM_BLOCK = 1024


class TritonExperts(ExpertsKernel):
    def __init__(self, spec: ExpertsSpec, machine: Machine, dtype: torch.dtype) -> None:
        self._spec, self._machine, self._dtype = spec, machine, dtype
        self._clamped = spec.clamped or NOT_CLAMPED
        self._gate = spec.activation if spec.clamped is None else "clamped"

    def pack(self, weights: ExpertWeights) -> Packed:
        gate_up, down = self._packed(weights.gate_up), self._packed(weights.down)
        return gate_up, down

    def _packed(self, weight: Weight) -> Dense | PackedGrouped:
        if isinstance(weight, Grouped):
            return pack_grouped(weight, self._machine, may_centre=True)
        assert isinstance(weight, Dense)
        return weight

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x) if out is None else out
        gate_up, down = packed
        if 0 < len(x) <= MAX_PAIR_ROWS and isinstance(gate_up, Dense) and isinstance(down, Dense):
            tiles = gate_pair_tile(self._spec), down_pair_tile(self._spec)
            self.by_pairs(x, weights, ids, (gate_up, down), out, *tiles)
        elif len(x):
            self.by_tiles(
                x, weights, ids, packed, out, tiles_of(len(x), self._spec, self._machine, self._dtype)
            )  # fmt: skip
        return out

    def by_pairs(
        self, x: Tensor, weights: Tensor, ids: Tensor, packed: tuple[Dense, Dense], out: Tensor, gate: PairTile,
        down: PairTile,
    ) -> None:  # fmt: skip
        """With these tiles, as `by_tiles`."""
        spec, overlaps = self._spec, self._machine.overlaps(len(x))
        inner = x.new_empty(ids.numel(), spec.intermediate_size)
        gate_kernel[(ids.numel(), triton.cdiv(spec.intermediate_size, gate.features))](
            x, ids, packed[0].weight, _bias(packed[0]), inner, x.stride(0), spec.first_expert, spec.num_experts,
            self._clamped.alpha, self._clamped.limit, spec.intermediate_size, spec.hidden_size, spec.top_k,
            gate.features, gate.piece, packed[0].bias is not None, self._gate, overlaps,
            num_warps=gate.num_warps, **launch_options(overlaps),
        )  # fmt: skip
        down_kernel[(len(x), triton.cdiv(spec.hidden_size, down.features))](
            inner, ids, weights, packed[1].weight, _bias(packed[1]), out, spec.first_expert, spec.num_experts,
            spec.hidden_size, spec.intermediate_size, spec.top_k, triton.next_power_of_2(spec.top_k), down.features,
            down.piece, packed[1].bias is not None, overlaps, num_warps=down.num_warps, **launch_options(overlaps),
        )  # fmt: skip

    def by_tiles(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed, out: Tensor, tiles: Tiles) -> None:
        """Into `out`, which is contiguous."""
        spec, overlaps = self._spec, self._machine.overlaps(len(x))
        sorted_pairs = sort_pairs(ids, spec.first_expert, spec.num_experts, tiles.gate.rows, overlaps=overlaps)
        inner = x.new_empty(ids.numel(), spec.intermediate_size)
        self.product(x, sorted_pairs, packed[0], inner, tiles.gate, is_gated=True, overlaps=overlaps)
        results = x.new_empty(ids.numel(), spec.hidden_size)
        self.product(inner, sorted_pairs, packed[1], results, tiles.down, is_gated=False, overlaps=overlaps)
        sum_kernel[(len(x), triton.cdiv(spec.hidden_size, SUM_BLOCK))](
            results, ids, weights, out, spec.first_expert, spec.num_experts, spec.hidden_size, spec.top_k,
            triton.next_power_of_2(spec.top_k), SUM_BLOCK, overlaps, num_warps=4, **launch_options(overlaps),
        )  # fmt: skip

    def product(
        self, x: Tensor, sorted_pairs: SortedPairs, weight: Dense | PackedGrouped, out: Tensor, tile: GroupedTile, *,
        is_gated: bool, overlaps: bool,
    ) -> None:  # fmt: skip
        """See `grouped_kernel`. `sorted_pairs`: in tiles of as many rows as the tile has."""
        if isinstance(weight, Dense):
            numbers = scales = weight.weight
            form, group, has_minima = PLAIN.value, 0, False
        else:
            numbers, scales, _, form, group, has_minima = weight
            tile = replace(tile, piece=min(tile.piece, power_of_two_in(x.shape[1])))  # 128 at most, as groups at least
        num_outputs, num_inputs, num_tiles = out.shape[1], x.shape[1], len(sorted_pairs.tiles)
        num_columns = triton.cdiv(num_outputs * (1 + is_gated), tile.features)
        grouped_kernel[(num_tiles * num_columns,)](
            x, sorted_pairs.pairs, sorted_pairs.tiles, numbers, scales,
            numbers if weight.bias is None else weight.bias, out, num_tiles, x.stride(0),
            self._clamped.alpha, self._clamped.limit, num_outputs, num_inputs, self._spec.top_k, tile.rows,
            tile.features, tile.piece, tile.num_stages, tile.band, form, group, has_minima,
            num_inputs % tile.piece == 0,
            weight.bias is not None, is_gated, self._gate, overlaps, num_warps=tile.num_warps,
            **launch_options(overlaps),
        )  # fmt: skip


def supports_experts(spec: ExpertsSpec, device: torch.device, dtype: torch.dtype) -> bool:
    if spec.kind is Grouped:
        is_whole = spec.hidden_size % INPUTS == 0 == spec.intermediate_size % INPUTS
        return is_whole and dtype in (torch.bfloat16, torch.float16)
    return spec.kind is Dense


def _bias(weight: Dense) -> Tensor:
    """Or a tensor that nobody reads."""
    return weight.weight if weight.bias is None else weight.bias
