"""What linear layers of few rows share, whatever their weights are stored as: tiles, and what becomes of the sums."""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.linear_vector import silu_times
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.messages import addresses_of, send, words_of
from worker.parallel.symmetric import Inboxes

MAX_ROWS = 64
"""Above, cuBLAS reads the weights as fast."""
MAX_MEMORY = 200_000
"""Bytes of a processor's shared memory that a program takes."""
LATE_ROWS = 32
"""Up to so many a product lets the next kernel begin only at its end: what waits would hold up its own loads."""


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    """At least 16: a tensor core's."""
    features: int
    """Rows of the weight."""
    piece: int
    """Input features taken at a time."""
    num_stages: int
    num_warps: int = 4

    def shared_memory(self, itemsize: int, weight_itemsize: int) -> int:
        """Bytes of the stages that are under way."""
        return (self.rows * itemsize + self.features * weight_itemsize) * self.piece * self.num_stages


class Outbox(NamedTuple):
    """What a kernel is told of where its sums are sent: nowhere, if there is one rank."""

    memory: tuple[Tensor, Tensor, int]
    ranks: tuple[int, int]

    @classmethod
    def to(cls, inboxes: Inboxes | None, out: Tensor) -> "Outbox":
        """`out` stands for what is not there."""
        if inboxes is None:
            return cls((out, out, 0), (0, 1))
        return cls((inboxes.addresses, inboxes.turns, inboxes.num_words), (inboxes.rank, len(inboxes.addresses)))


def tile_that_fits(
    rows: int, features: int, piece: int, most_stages: int, machine: Machine, itemsize: int, weight_itemsize: int
) -> Tile:
    """That of the most stages that there is memory for; 2 in any case."""
    tiles = [Tile(rows, features, piece, num_stages) for num_stages in range(most_stages, 1, -1)]
    most_memory = min(machine.shared_memory, MAX_MEMORY)
    return next((tile for tile in tiles if tile.shared_memory(itemsize, weight_itemsize) <= most_memory), tiles[-1])


@triton.jit
def features_of_program(N, FEATURES: tl.constexpr, IS_GATED: tl.constexpr):
    """Rows of the weight, int64 [FEATURES], of a program of N outputs. IS_GATED: of an output's two features, which are
    weight[n] and weight[N + n], the gate is in an even column and the up behind it. Outputs past the last are those of
    the last one: read without a mask, and not stored."""
    column = tl.arange(0, FEATURES)
    if IS_GATED:
        feature = tl.minimum(tl.program_id(0) * (FEATURES // 2) + column // 2, N - 1) + column % 2 * N
    else:
        feature = tl.minimum(tl.program_id(0) * FEATURES + column, N - 1)
    return feature.to(tl.int64)


@triton.jit
def outbox_of(inboxes, turns, num_rows, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """(each row's turn, addresses), asked for before sums are there, so that they leave at once. Of one rank
    nothing that counts."""
    m = tl.arange(0, ROWS)
    turn, addresses = m, ()
    if SIZE > 1:
        turn = tl.load(turns + m, mask=m < num_rows, other=0)
        addresses = addresses_of(inboxes, SIZE)
    return turn, addresses


@triton.jit
def store_sums(
    total, feature, bias, out, num_rows, out_stride, N, outbox, message_stride,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The sums [ROWS, FEATURES] of those features, with their bias, to out [num_rows, N]; gated, if they are to be.
    SIZE > 1: they are a part of a sum over so many ranks, which goes to all of them (`messages`), and not to out."""
    m = tl.arange(0, ROWS)
    is_row = m < num_rows
    row = m[:, None].to(tl.int64)
    if HAS_BIAS:
        total += tl.load(bias + feature).to(tl.float32)[None, :]
    if IS_GATED:
        gate, up = tl.split(tl.reshape(total, [ROWS, FEATURES // 2, 2]))
        n = tl.program_id(0) * (FEATURES // 2) + tl.arange(0, FEATURES // 2)
        places = out + row * out_stride + n[None, :]
        tl.store(places, silu_times(gate, up).to(out.dtype.element_ty), mask=is_row[:, None] & (n < N))
    elif SIZE > 1:
        low, high = tl.split(tl.reshape(total, [ROWS, FEATURES // 2, 2]))
        word = tl.program_id(0) * (FEATURES // 2) + tl.arange(0, FEATURES // 2)[None, :]
        words = words_of(low, high, out.dtype.element_ty, True)
        inside = is_row[:, None] & (word < N // 2)
        turn, addresses = outbox
        send(words, row, word, inside, turn[:, None], addresses, message_stride, RANK, SIZE, True)
    else:
        n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
        places = out + row * out_stride + n[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=is_row[:, None] & (n < N))
