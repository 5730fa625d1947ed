"""Linear layers over numbers of a byte or half of one (see `weight_tile`).

Of up to `MAX_ROWS` rows the tensor cores multiply numbers that were put together in registers; one row is no
exception, as tensor cores have time for rows that are not there, and other units do not. For more rows the weight is
put together in memory, and the rest is cuBLAS: on an H200 that takes as long for 64 rows, and less for more.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.linear import LinearKernel, LinearSpec
from worker.kernels.torch.linear import PackedLinear, PlainLinear
from worker.kernels.triton.linear_rows import (
    LATE_ROWS,
    MAX_ROWS,
    Tile,
    features_of_program,
    store_sums,
    tile_that_fits,
)
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import (
    LINE_BYTES,
    launch_options,
    let_next_begin,
    prefetch,
    wait_for_kernel_before,
)
from worker.kernels.triton.weight_tile import (
    CENTRED,
    INPUTS,
    UINT4,
    PackedGrouped,
    pack_grouped,
    row_scale,
    weight_tile,
)
from worker.kernels.weights import Grouped, Weight, power_of_two_in

SPREAD = (16, 128)
"""Rows and, at most, inputs of the part of a weight that a program puts together in memory."""


def has_many_programs(out_features: int, machine: Machine) -> bool:
    """For its processors; else products take longer pieces than one group, which is worth more than scaling sums."""
    return triton.cdiv(out_features, 64) > machine.num_sms


@cache
def tile_of(num_rows: int, out_features: int, most_inputs: int, machine: Machine, *, has_halves: bool) -> Tile:
    """From what was measured on an H200, by how many programs there are for its processors. `num_rows`: a power of two;
    `most_inputs`: which a piece can be of; `has_halves`: numbers are halves of bytes."""
    rows = max(16, num_rows)
    is_many = has_many_programs(out_features, machine)
    if rows == 16:
        piece, num_stages = 256, 3 if is_many else 5
    elif is_many:
        piece, num_stages = (128, 3) if has_halves else (64, 5)
    else:
        piece, num_stages = 128, 4
    if piece > most_inputs:
        piece, num_stages = most_inputs, 5
    return tile_that_fits(rows, 64 if is_many else 32, piece, num_stages, machine, itemsize=2, weight_itemsize=1)


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_rows_kernel(
    x, numbers, scales, bias, out, num_rows, x_stride, out_stride, N, K,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, OVERLAPS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Some of N outputs of all rows. Pieces fill K. IS_GATED: see `features_of_program`."""
    m = tl.arange(0, ROWS)
    is_row = m < num_rows
    row = features_of_program(N, FEATURES, IS_GATED)
    x_rows = x + m[:, None] * x_stride
    SHARE: tl.constexpr = 2 if FORM >= UINT4 else 1
    WIDTH: tl.constexpr = PIECE // SHARE
    line = tl.arange(0, (WIDTH + LINE_BYTES - 1) // LINE_BYTES)[None, :] * LINE_BYTES
    for stage in tl.static_range(STAGES - 1):
        at = tl.minimum(stage * WIDTH + line, K // SHARE - 1)
        prefetch(numbers + row[:, None] * (K // SHARE) + at, OVERLAPS)
    let_next_begin(OVERLAPS and IS_EARLY)
    wait_for_kernel_before(OVERLAPS)
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    for start in tl.range(0, K, PIECE, num_stages=STAGES):
        k = start + tl.arange(0, PIECE)[None, :]
        a = tl.load(x_rows + k, mask=is_row[:, None], other=0.0)
        b, factor = weight_tile(numbers, scales, row, start, K, PIECE, FORM, GROUP, HAS_MINIMA, x.dtype.element_ty)
        if FORM == CENTRED:
            total += tl.dot(a, tl.trans(b)) * factor[None, :]
        else:
            total = tl.dot(a, tl.trans(b), total)
    let_next_begin(OVERLAPS and not IS_EARLY)
    total *= row_scale(scales, row, GROUP)[None, :]
    store_sums(
        total, row, bias, out, num_rows, out_stride, N, (), 0, ROWS, FEATURES, HAS_BIAS, IS_GATED, 0, 1
    )  # fmt: skip


@triton.jit
def _spread_kernel(
    numbers, scales, out, N, K, ROWS: tl.constexpr, PIECE: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
):  # fmt: skip
    """out[n, k] of N × K: the weight."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1)
    start = tl.program_id(1) * PIECE
    tile, factor = weight_tile(numbers, scales, row, start, K, PIECE, FORM, GROUP, HAS_MINIMA, tl.float32)
    k = start + tl.arange(0, PIECE)[None, :]
    values = tile * row_scale(scales, row, GROUP)[:, None]
    if FORM == CENTRED:
        values *= factor[:, None]
    tl.store(out + n[:, None] * K + k, values.to(out.dtype.element_ty), mask=(n < N)[:, None])


class TritonGroupedLinear(LinearKernel):
    def __init__(self, spec: LinearSpec, machine: Machine) -> None:
        self._out, self._in, self._machine = spec.out_features, spec.in_features, machine
        self._plain = PlainLinear()

    def pack(self, weight: Weight) -> PackedGrouped:
        assert isinstance(weight, Grouped)
        return pack_grouped(weight, self._machine, may_centre=has_many_programs(self._out, self._machine))

    def __call__(self, x: Tensor, packed: PackedGrouped, out: Tensor | None = None) -> Tensor:
        if len(x) > MAX_ROWS:
            return self._plain(x, PackedLinear(self.weight(packed, x.dtype), packed.bias), out)
        out = x.new_empty(len(x), self._out) if out is None else out
        self._launch(x, packed, out, is_gated=False)
        return out

    def gated(self, x: Tensor, packed: PackedGrouped) -> Tensor | None:
        if len(x) > MAX_ROWS:
            return None
        out = x.new_empty(len(x), self._out // 2)
        self._launch(x, packed, out, is_gated=True)
        return out

    def weight(self, packed: PackedGrouped, dtype: torch.dtype) -> Tensor:
        """[out, in], put together."""
        rows, piece = SPREAD[0], min(SPREAD[1], power_of_two_in(self._in))
        weight = torch.empty(self._out, self._in, dtype=dtype, device=packed.numbers.device)
        _spread_kernel[(triton.cdiv(self._out, rows), self._in // piece)](
            packed.numbers, packed.scales, weight, self._out, self._in, rows, piece, packed.form, packed.group,
            packed.has_minima, num_warps=4,
        )  # fmt: skip
        return weight

    def _launch(self, x: Tensor, packed: PackedGrouped, out: Tensor, *, is_gated: bool) -> None:
        most = min(power_of_two_in(self._in), packed.group if packed.form == CENTRED.value else self._in)
        if len(x):
            has_halves = packed.form >= UINT4.value
            tile = tile_of(triton.next_power_of_2(len(x)), self._out, most, self._machine, has_halves=has_halves)
            self.launch(x, packed, out, tile, is_gated=is_gated)

    def launch(self, x: Tensor, packed: PackedGrouped, out: Tensor, tile: Tile, *, is_gated: bool = False) -> None:
        """The product, with this tile."""
        overlaps, num_outputs = self._machine.overlaps(len(x)), out.shape[1]
        _grouped_rows_kernel[(triton.cdiv(self._out, tile.features),)](
            x, packed.numbers, packed.scales, packed.numbers if packed.bias is None else packed.bias, out,
            len(x), x.stride(0), out.stride(0), num_outputs, self._in,
            tile.rows, tile.features, tile.piece, tile.num_stages, packed.form, packed.group, packed.has_minima,
            packed.bias is not None, is_gated, overlaps, len(x) > LATE_ROWS,
            num_warps=tile.num_warps, **launch_options(overlaps),
        )  # fmt: skip


def supports_grouped_linear(spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> bool:
    return spec.kind is Grouped and dtype in (torch.bfloat16, torch.float16) and spec.in_features % INPUTS == 0
