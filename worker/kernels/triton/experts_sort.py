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
"""Pairs taken at a time. Of so many, every program counts those of all experts by itself."""
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


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids, counts, num_pairs, first_expert, num_experts, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        local = _local_ids(ids, start + tl.arange(0, BLOCK), num_pairs, first_expert, num_experts)
        found += (local == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_kernel(
    ids, counts, pairs, tiles, num_pairs, num_tiles, first_expert, num_experts, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ARE_COUNTED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """ROWS: of a tile. EXPERTS: a power of two above their number, for what belongs to none."""
    me = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    wait_for_kernel_before(OVERLAPS)
    let_next_begin(OVERLAPS)
    if ARE_COUNTED:
        count = tl.load(counts + expert, mask=expert < num_experts, other=0)
    else:
        local = _local_ids(ids, tl.arange(0, BLOCK), num_pairs, first_expert, num_experts)
        count = tl.histogram(tl.where(local < 0, EXPERTS - 1, local), EXPERTS)
        count = tl.where(expert < num_experts, count, 0)
    tiles_of = (count + ROWS - 1) // ROWS
    place = tl.sum(tl.where(expert < me, count, 0))
    end = place + tl.sum(tl.where(expert == me, count, 0))
    first_tile = tl.sum(tl.where(expert < me, tiles_of, 0))
    for tile in range(0, (end - place + ROWS - 1) // ROWS):
        entry = tiles + (first_tile + tile) * TILE_FIELDS
        tl.store(entry, me)
        tl.store(entry + 1, place + tile * ROWS)
        tl.store(entry + 2, tl.minimum(place + (tile + 1) * ROWS, end))
    for tile in range(tl.sum(tiles_of) + me, num_tiles, num_experts):
        tl.store(tiles + tile * TILE_FIELDS, -1)
    if place == end:
        return
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_mine = _local_ids(ids, pair, num_pairs, first_expert, num_experts) == me
        before = tl.cumsum(is_mine.to(tl.int32))
        tl.store(pairs + place + before - 1, pair, mask=is_mine)
        place += tl.max(before)


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """However the pairs are spread: each expert that has some may have one tile that is not full."""
    begun = min(num_pairs, num_experts)
    return begun + (num_pairs - begun) // tile_rows


def sort_pairs(ids: Tensor, first_expert: int, num_experts: int, tile_rows: int, *, overlaps: bool) -> SortedPairs:
    """ids [T, k], contiguous."""
    num_pairs, num_tiles = ids.numel(), most_tiles(ids.numel(), num_experts, tile_rows)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(num_tiles, TILE_FIELDS.value, dtype=torch.int32, device=ids.device)
    block = min(BLOCK, max(128, triton.next_power_of_2(num_pairs)))
    num_warps = max(1, block // 256)
    counts = pairs
    if num_pairs > BLOCK:
        counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
        _count_kernel[(num_experts,)](ids, counts, num_pairs, first_expert, num_experts, block, num_warps=num_warps)
    _sort_kernel[(num_experts,)](
        ids, counts, pairs, tiles, num_pairs, num_tiles, first_expert, num_experts, tile_rows,
        triton.next_power_of_2(num_experts + 1), block, num_pairs > BLOCK, overlaps,
        num_warps=num_warps, **launch_options(overlaps),
    )  # fmt: skip
    return SortedPairs(pairs, tiles)
