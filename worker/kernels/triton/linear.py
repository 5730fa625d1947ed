"""Linear layers of few rows, which are bound by reading the weights; cuBLAS has the others.

One row is a matrix-vector product (`linear_vector`); a few rows of a small weight hold it (`linear_held`). Up to
`MAX_ROWS` a program computes some output features of all rows, so that each weight is read once, and streams them in
long pieces of the input features. A gated product computes a feature's gate and up side by side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.linear import LinearSpec
from worker.kernels.torch.linear import PackedLinear, PlainLinear
from worker.kernels.triton.linear_held import ROWS as HELD_ROWS
from worker.kernels.triton.linear_held import HeldTile, held_kernel, held_tile
from worker.kernels.triton.linear_rows import (
    LATE_ROWS,
    MAX_ROWS,
    Outbox,
    Tile,
    features_of_program,
    outbox_of,
    store_sums,
    tile_that_fits,
)
from worker.kernels.triton.linear_vector import WIDEST as WIDEST_HELD
from worker.kernels.triton.linear_vector import vector_kernel, vector_tile
from worker.kernels.triton.linear_vector_normed import WIDEST as WIDEST_NORMED
from worker.kernels.triton.linear_vector_normed import normed_tile, normed_vector_kernel
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import launch_options, let_next_begin, prefetch, wait_for_kernel_before
from worker.kernels.weights import Dense
from worker.parallel.symmetric import Inboxes

LINE = tl.constexpr(64)
"""Elements of two bytes in a line of the L2 cache."""
AT_A_TIME = 3
"""Programs of 64 rows and 64 features, in pieces of 64, that a processor has memory for."""
LEAST_BUSY = 0.9
"""Share of the places of all processors: programs that leave more of them empty are made smaller, and so more even."""
WIDEST_NORM = 2048
"""Input features of which each program of a product works out the norm: of more, that is more work than a kernel."""


def tile_of(num_rows: int, out_features: int, in_features: int, machine: Machine, itemsize: int) -> Tile:
    """By how many programs there are for the device's processors: few of them take the longest pieces, and as many as
    fit; many take short ones, several programs on a processor. From what was measured on an H100, and, of more than 32
    rows, on an H200: there the rows, which every program reads, are as many bytes as its weights, and more features
    read them less often."""
    rows = max(16, triton.next_power_of_2(num_rows))
    if triton.cdiv(out_features, 32) <= machine.num_sms:
        features, piece, most_stages = 32, 256, 5
    elif triton.cdiv(out_features, 64) <= machine.num_sms:
        features, piece, most_stages = 64, 128, 5
    elif rows <= 32:
        features, piece, most_stages = 64, 128, 4 if rows == 16 else 3
    elif is_even(triton.cdiv(out_features, 64), machine):
        features, piece, most_stages = 64, 64, 4
    elif triton.cdiv(out_features, 64) <= 2 * machine.num_sms:
        features, piece, most_stages = 64, 64, 5
    elif triton.cdiv(out_features, 128) > AT_A_TIME * machine.num_sms:
        features, piece, most_stages = 128, 64, 3
    else:
        features, piece, most_stages = 32, 128, 3
    piece = min(piece, max(16, triton.next_power_of_2(in_features)))
    return tile_that_fits(rows, features, piece, most_stages, machine, itemsize, itemsize)


def is_even(num_programs: int, machine: Machine) -> bool:
    """All have a place at once, and hardly a processor has fewer than another one."""
    a_processor = triton.cdiv(num_programs, machine.num_sms)
    return a_processor <= AT_A_TIME and num_programs >= LEAST_BUSY * a_processor * machine.num_sms


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x, weight, bias, out, inboxes, turns, message_stride, num_rows, x_stride, out_stride, N, K,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, OVERLAPS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Some of N outputs of all rows. IS_EVEN: pieces fill K. IS_GATED: see `features_of_program`."""
    m = tl.arange(0, ROWS)
    is_row = m < num_rows
    feature = features_of_program(N, FEATURES, IS_GATED)
    w_rows = weight + feature[:, None] * K
    x_rows = x + m[:, None] * x_stride
    line = tl.arange(0, (PIECE + LINE - 1) // LINE)[None, :] * LINE
    for stage in tl.static_range(STAGES - 1):
        prefetch(w_rows + tl.minimum(stage * PIECE + line, K - 1), OVERLAPS)
    let_next_begin(OVERLAPS and IS_EARLY and SIZE == 1)
    wait_for_kernel_before(OVERLAPS)
    let_next_begin(OVERLAPS and IS_EARLY and SIZE > 1)  # see `sum_norm`
    outbox = outbox_of(inboxes, turns, num_rows, ROWS, SIZE)
    # The widest instruction of a tensor core takes 64 rows of its first operand: features, where rows are fewer.
    IS_TURNED: tl.constexpr = ROWS < 64 and FEATURES >= 64
    total = tl.zeros([FEATURES, ROWS] if IS_TURNED else [ROWS, FEATURES], tl.float32)
    for start in tl.range(0, K, PIECE, num_stages=STAGES):
        k = start + tl.arange(0, PIECE)[None, :]
        if IS_EVEN:
            a = tl.load(x_rows + k, mask=is_row[:, None], other=0.0)
            b = tl.load(w_rows + k)
        else:
            a = tl.load(x_rows + k, mask=is_row[:, None] & (k < K), other=0.0)
            b = tl.load(w_rows + k, mask=k < K, other=0.0)
        if IS_TURNED:
            total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if IS_TURNED:
        total = tl.trans(total)
    let_next_begin(OVERLAPS and not IS_EARLY)
    store_sums(
        total, feature, bias, out, num_rows, out_stride, N, outbox, message_stride,
        ROWS, FEATURES, HAS_BIAS, IS_GATED, RANK, SIZE,
    )  # fmt: skip


class TritonLinear(PlainLinear):
    """See `LinearKernel`."""

    def __init__(self, spec: LinearSpec, machine: Machine, dtype: torch.dtype) -> None:
        self._out, self._in, self._machine = spec.out_features, spec.in_features, machine
        self._tiles = {
            rows: tile_of(rows, self._out, self._in, machine, dtype.itemsize) for rows in range(2, MAX_ROWS + 1)
        }
        self._held = held_tile(self._out, self._in, machine)

    def __call__(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        if not self._is_skinny(x):
            return super().__call__(x, packed, out)
        return self._product(x, packed, x.new_empty(len(x), self._out) if out is None else out)

    def gated(self, x: Tensor, packed: PackedLinear) -> Tensor | None:
        if not self._is_skinny(x):
            return None
        return self._product(x, packed, x.new_empty(len(x), self._out // 2), is_gated=True)

    def sent(self, x: Tensor, packed: PackedLinear, inboxes: Inboxes) -> Tensor | None:
        """Of several rows: a program of one row has too few outputs beside each other."""
        if not 1 < len(x) <= MAX_ROWS:
            return None
        out = x.new_empty(len(x), self._out)
        if not inboxes.hold(out):
            return None
        self._product(x, packed, out, inboxes=inboxes)
        return inboxes.keep(out)

    def _is_skinny(self, x: Tensor) -> bool:
        return 0 < len(x) <= MAX_ROWS

    def of_norm(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, packed: PackedLinear, *, is_gated: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Of one row: its norm is worked out by each program anew."""
        if len(x) != 1 or self._in > WIDEST_NORM:
            return None
        out, new_residual = x.new_empty(1, self._out // (1 + is_gated)), torch.empty_like(residual)
        self._launch_vector(x, packed, out, (residual, norm_weight, new_residual, eps), is_gated=is_gated)
        return out, new_residual

    def held_tile(self, num_rows: int) -> HeldTile | None:
        """Of so many rows, more than one; None where they stream the weight."""
        return self._held if num_rows <= HELD_ROWS else None

    def _product(
        self, x: Tensor, packed: PackedLinear, out: Tensor, *, is_gated: bool = False, inboxes: Inboxes | None = None
    ) -> Tensor:
        if len(x) == 1:
            self._launch_vector(x, packed, out, None, is_gated=is_gated)
        elif (held := self.held_tile(len(x))) is not None:
            self._launch_held(x, packed, out, held, is_gated=is_gated, inboxes=inboxes)
        else:
            self.launch(x, packed, out, self._tiles[len(x)], is_gated=is_gated, inboxes=inboxes)
        return out

    def _launch_vector(
        self, x: Tensor, packed: PackedLinear, out: Tensor, norm: tuple[Tensor, Tensor, Tensor, float] | None, *,
        is_gated: bool,
    ) -> None:  # fmt: skip
        """`norm`: residual, the norm's weight, the new residual and eps."""
        if norm is not None and self._in <= WIDEST_NORMED:
            self._launch_normed(x, packed, out, norm, is_gated=is_gated)
            return
        residual, norm_weight, new_residual, eps = (x, x, x, 0.0) if norm is None else norm
        overlaps, num_outputs = self._machine.overlaps(1), out.shape[1]
        tile = vector_tile(num_outputs, self._in, 1 + is_gated, self._machine)
        # A norm makes a program long: the next one would take its place too early.
        is_early = norm is None and self._in <= WIDEST_HELD
        vector_kernel[(triton.cdiv(num_outputs, tile.outputs),)](
            x, residual, norm_weight, new_residual, packed.weight,
            packed.weight if packed.bias is None else packed.bias, out, eps, num_outputs, self._in,
            tile.outputs, tile.piece, tile.num_held, norm is not None, packed.bias is not None, is_gated, is_early,
            overlaps, num_warps=tile.num_warps, **launch_options(overlaps),
        )  # fmt: skip

    def _launch_normed(
        self, x: Tensor, packed: PackedLinear, out: Tensor, norm: tuple[Tensor, Tensor, Tensor, float], *,
        is_gated: bool,
    ) -> None:  # fmt: skip
        """Of few input features."""
        residual, norm_weight, new_residual, eps = norm
        overlaps, num_outputs = self._machine.overlaps(1), out.shape[1]
        tile = normed_tile(num_outputs, self._in, 1 + is_gated, x.dtype.itemsize, self._machine)
        normed_vector_kernel[(triton.cdiv(num_outputs, tile.num_warps * tile.times),)](
            x, residual, norm_weight, new_residual, packed.weight,
            packed.weight if packed.bias is None else packed.bias, out, eps, num_outputs, self._in,
            tile.num_warps, tile.times, tile.piece, tile.lanes, packed.bias is not None, is_gated, overlaps,
            num_warps=tile.num_warps, **launch_options(overlaps),
        )  # fmt: skip

    def _launch_held(
        self, x: Tensor, packed: PackedLinear, out: Tensor, tile: HeldTile, *, is_gated: bool, inboxes: Inboxes | None
    ) -> None:
        overlaps, outbox = self._machine.overlaps(len(x)), Outbox.to(inboxes, out)
        held_kernel[(triton.cdiv(self._out, tile.features),)](
            x, packed.weight, packed.weight if packed.bias is None else packed.bias, out,
            *outbox.memory, len(x), x.stride(0), out.stride(0), out.shape[1], self._in,
            HELD_ROWS, tile.features, tile.num_warps, tile.piece, tile.num_held, packed.bias is not None, is_gated,
            *outbox.ranks, overlaps, num_warps=tile.num_warps, **launch_options(overlaps),
        )  # fmt: skip

    def launch(
        self, x: Tensor, packed: PackedLinear, out: Tensor, tile: Tile, *, is_gated: bool = False,
        inboxes: Inboxes | None = None,
    ) -> None:  # fmt: skip
        """The product of several rows, with this tile."""
        overlaps, outbox = self._machine.overlaps(len(x)), Outbox.to(inboxes, out)
        _rows_kernel[(triton.cdiv(self._out, tile.features),)](
            x, packed.weight, packed.weight if packed.bias is None else packed.bias, out,
            *outbox.memory, len(x), x.stride(0), out.stride(0), out.shape[1], self._in,
            tile.rows, tile.features, tile.piece, tile.num_stages, self._in % tile.piece == 0, packed.bias is not None,
            is_gated, *outbox.ranks, overlaps, len(x) > LATE_ROWS, num_warps=tile.num_warps,
            **launch_options(overlaps),
        )  # fmt: skip


def supports_linear(spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """float32 is for exact results: cuBLAS alone."""
    return spec.kind is Dense and dtype in (torch.bfloat16, torch.float16) and spec.in_features % 16 == 0
