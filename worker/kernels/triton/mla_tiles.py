"""What a program of absorbed attention takes at a time."""

from dataclasses import dataclass

import triton

from worker.kernels.mla import MlaSpec
from worker.kernels.triton.machine import Machine

MAX_UNIFORM = 16
"""Tokens of a uniform row that one tile may have."""


@dataclass(frozen=True, slots=True)
class Tile:
    heads: int
    tokens: int
    keys: int
    num_stages: int
    num_warps: int
    resident: int
    """Programs that a multiprocessor runs at a time."""

    @property
    def queries(self) -> int:
        """Tokens × heads, and padding."""
        return max(16, self.heads * triton.next_power_of_2(self.tokens))


def tile_of(spec: MlaSpec, machine: Machine, tokens: int | None = None) -> Tile:
    """For rows of so many tokens each, or, None, for chunks: as many as fit. Queries of a tile share what is read of
    the cache, and 64 of them with their mixtures are what the registers of a multiprocessor hold."""
    most = 64 if spec.dtype.itemsize == 2 else 16
    heads = min(most, triton.next_power_of_2(spec.num_heads))
    if tokens is None:
        tokens = most // heads
    else:
        heads = min(heads, max(1, most // triton.next_power_of_2(tokens)))
    if heads * tokens > 32:
        keys = 64 if machine.shared_memory > 221_440 else 32
        return Tile(heads, tokens, keys, num_stages=3, num_warps=8, resident=1)
    # Stages beyond the second make room for one buffer more, as blocks are looked up a stage before they are read.
    return Tile(heads, tokens, 32 if spec.dtype.itemsize == 2 else 16, num_stages=5, num_warps=4, resident=2)


@dataclass(frozen=True, slots=True)
class ExpandedTile:
    """Of a head's queries, against keys that were expanded."""

    queries: int
    keys: int
    num_stages: int
    num_warps: int


def expanded_tile_of(spec: MlaSpec, machine: Machine) -> ExpandedTile:
    if spec.dtype.itemsize > 2:
        return ExpandedTile(32, 32, num_stages=2, num_warps=4)
    return ExpandedTile(128, 64, num_stages=3 if machine.shared_memory > 172_032 else 2, num_warps=8)


def head_blocks(spec: MlaSpec, tile: Tile) -> int:
    """Programs that share the heads of a token."""
    return -(-spec.num_heads // tile.heads)
