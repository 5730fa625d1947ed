"""Which tiles experts are computed in, by the number of tokens: from what was measured on an H100 in bfloat16, of 128
experts of 2,048 × 768, eight of a token.

Few pairs of an expert take the smallest tile and are bound by reading its weights; many take the largest, and are bound
by the tensor cores.
"""

from dataclasses import dataclass

import torch
import triton

from worker.kernels.experts import ExpertsSpec
from worker.kernels.triton.experts_grouped import GroupedTile
from worker.kernels.triton.experts_pairs import PairTile
from worker.kernels.triton.linear_rows import MAX_MEMORY
from worker.kernels.triton.machine import Machine

MAX_PAIR_ROWS = 4
"""Above, rows that share an expert are many enough to read its weights together."""
MAX_TOKENS = 4096
"""Steps of more tokens are computed as those of so many: tiles grow no more."""
PAIR_ELEMENTS = 1024
"""Of a weight that a program of pairs takes at a time."""
FEW, SOME, MANY, MOST = (
    GroupedTile(rows=16, features=64, piece=128, num_stages=4, num_warps=4),
    GroupedTile(rows=32, features=64, piece=128, num_stages=4, num_warps=4),
    GroupedTile(rows=64, features=128, piece=64, num_stages=4, num_warps=4, band=8),
    GroupedTile(rows=128, features=256, piece=64, num_stages=4, num_warps=8, band=4),
)
EXACT = GroupedTile(rows=16, features=64, piece=64, num_stages=3, num_warps=4)
"""Of float32: it is for exact results."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of both products: they have the same number of rows."""

    gate: GroupedTile
    down: GroupedTile


def gate_pair_tile(spec: ExpertsSpec) -> PairTile:
    piece = min(PAIR_ELEMENTS, triton.next_power_of_2(spec.hidden_size))
    return PairTile(features=PAIR_ELEMENTS // piece, piece=piece, num_warps=8)


def down_pair_tile(spec: ExpertsSpec) -> PairTile:
    """A program has all of a row's experts."""
    return PairTile(features=4, piece=max(128, PAIR_ELEMENTS // triton.next_power_of_2(spec.top_k)), num_warps=4)


def tiles_of(num_tokens: int, spec: ExpertsSpec, machine: Machine, dtype: torch.dtype) -> Tiles:
    """Alike for all numbers of tokens between two powers of two: kernels are compiled ahead for those."""
    tokens = min(triton.next_power_of_2(num_tokens), MAX_TOKENS)
    pairs_of_each = tokens * spec.top_k / (spec.num_experts + spec.num_elsewhere)
    if dtype == torch.float32:
        tile = EXACT
    elif pairs_of_each <= 8:
        tile = FEW
    elif pairs_of_each <= 16:
        tile = SOME
    elif pairs_of_each <= 64:
        tile = MANY
    else:
        tile = MOST
    most_memory = min(machine.shared_memory, MAX_MEMORY)
    return Tiles(
        gate=tile.within(spec.hidden_size, most_memory, dtype.itemsize),
        down=tile.within(spec.intermediate_size, most_memory, dtype.itemsize),
    )
