"""Pairs of a row and one of its experts, by expert, and in tiles of which each is one expert's.

A program an expert picks its own pairs in their order, so that nothing depends on which program is faster. The tables
have a fixed size, and what is left over of them is marked: nobody asks the device how many tiles there are.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before

BLOCK = 4096
"""Pairs that a program takes. Of one such block, every program counts those of all experts by itself."""
COUNTED_BLOCKS = tl.constexpr(32)
"""Whose counts a program takes at a time."""
TILE_FIELDS = tl.constexpr(4)
"""Of a tile: its expert, or -1; its first place among the sorted pairs; the place behind its last; nothing."""


class SortedPairs(NamedTuple):
    pairs: Tensor
    """int32 [T × k]: pairs (row × k + choice) by expert; those of other ranks' experts are left out."""
    tiles: Tensor
    """int32 [tiles, TILE_FIELDS]"""


@triton.jit
def _local_ids(ids, pair, num_pairs, first_expert, num_experts):
    """-1 where the expert is another rank's, or the pair none."""
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32) - first_expert
    return tl.where((pair < num_pairs) & (expert >= 0) & (expert < num_experts), expert, -1)


@triton.jit
def _counts_of_block(ids, pair, num_pairs, first_expert, num_experts, EXPERTS: tl.constexpr):
    """int32 [EXPERTS], a power of two above their number: what belongs to none is counted as the last one's."""
    local = _local_ids(ids, pair, num_pairs, first_expert, num_experts)
    return tl.histogram(tl.where(local < 0, EXPERTS - 1, local), EXPERTS)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids, counts, num_pairs, first_expert, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """counts [blocks, EXPERTS]: a program a block."""
    block, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    count = _counts_of_block(ids, pair, num_pairs, first_expert, num_experts, EXPERTS)
    tl.store(counts + block * EXPERTS + expert, count)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_kernel(
    ids, counts, pairs, tiles, num_pairs, num_tiles, first_expert, num_experts, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ARE_COUNTED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program for an expert and a block of pairs; the first block's writes the expert's tiles, of ROWS pairs."""
    me, block = tl.program_id(0), tl.program_id(1)
    expert = tl.arange(0, EXPERTS)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_kernel_before(OVERLAPS)
    let_next_begin(OVERLAPS)
    before = 0  # of my pairs, those in earlier blocks
    if ARE_COUNTED:
        count = tl.zeros([EXPERTS], tl.int32)
        for first in range(0, tl.num_programs(1), COUNTED_BLOCKS):
            other = (first + tl.arange(0, COUNTED_BLOCKS))[:, None]
            found = tl.load(counts + other * EXPERTS + expert[None, :], mask=other < tl.num_programs(1), other=0)
            count += tl.sum(found, 0)
            before += tl.sum(tl.where((other < block) & (expert[None, :] == me), found, 0))
    else:
        count = _counts_of_block(ids, pair, num_pairs, first_expert, num_experts, EXPERTS)
    count = tl.where(expert < num_experts, count, 0)
    place = tl.sum(tl.where(expert < me, count, 0))
    end = place + tl.sum(tl.where(expert == me, count, 0))
    if block == 0:
        tiles_of = (count + ROWS - 1) // ROWS
        first_tile = tl.sum(tl.where(expert < me, tiles_of, 0))
        for tile in range((end - place + ROWS - 1) // ROWS):
            entry = tiles + (first_tile + tile) * TILE_FIELDS
            tl.store(entry, me)
            tl.store(entry + 1, place + tile * ROWS)
            tl.store(entry + 2, tl.minimum(place + (tile + 1) * ROWS, end))
        for tile in range(tl.sum(tiles_of) + me, num_tiles, num_experts):
            tl.store(tiles + tile * TILE_FIELDS, -1)
    if place == end:
        return
    is_mine = _local_ids(ids, pair, num_pairs, first_expert, num_experts) == me
    within = tl.cumsum(is_mine.to(tl.int32)) - 1
    tl.store(pairs + place + before + within, pair, mask=is_mine)


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """However the pairs are spread: each expert that has some may have one tile that is not full."""
    begun = min(num_pairs, num_experts)
    return begun + (num_pairs - begun) // tile_rows


def sort_pairs(ids: Tensor, first_expert: int, num_experts: int, tile_rows: int, *, overlaps: bool) -> SortedPairs:
    """ids [T, k], contiguous."""
    num_pairs, num_tiles = ids.numel(), most_tiles(ids.numel(), num_experts, tile_rows)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(num_tiles, TILE_FIELDS.value, dtype=torch.int32, device=ids.device)
    # Alike for all numbers of rows between two powers of two: kernels are compiled ahead for those.
    most_pairs = triton.next_power_of_2(len(ids)) * ids.shape[1]
    are_counted, block = most_pairs > BLOCK, min(BLOCK, max(128, triton.next_power_of_2(most_pairs)))
    num_blocks, num_warps = triton.cdiv(num_pairs, block), max(1, block // 256)
    places = triton.next_power_of_2(num_experts + 1)
    counts = pairs
    if are_counted:
        counts = torch.empty(num_blocks, places, dtype=torch.int32, device=ids.device)
        _count_kernel[(num_blocks,)](
            ids, counts, num_pairs, first_expert, num_experts, places, block, num_warps=num_warps
        )
    _sort_kernel[(num_experts, num_blocks)](
        ids, counts, pairs, tiles, num_pairs, num_tiles, first_expert, num_experts, tile_rows, places, block,
        are_counted, overlaps, num_warps=num_warps, **launch_options(overlaps),
    )  # fmt: skip
    return SortedPairs(pairs, tiles)
