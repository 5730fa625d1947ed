"""Linear layers of few rows, which are bound by reading the weights; cuBLAS has the others.

One row is a matrix-vector product, a program an output feature. Up to `MOST_ROWS` a program computes some output
features of all rows, so that each weight is read once, and streams them in long pieces of the input features.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.interface import LinearSpec
from worker.kernels.torch.linear import PackedLinear, PlainLinear
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import launch_options, let_next_begin, prefetch, wait_for_kernel_before
from worker.kernels.weights import Dense

MOST_ROWS = 64
"""Above, cuBLAS reads the weights as fast."""
MOST_MEMORY = 200_000
"""Bytes of a processor's shared memory that a program takes."""
LINE = tl.constexpr(64)
"""Elements of two bytes in a line of the L2 cache."""
LATE_ROWS = 32
"""Up to so many a product lets the next kernel begin only at its end: what waits would hold up its own loads."""
VECTOR_PIECE = 1024
"""Input features that the product of one row takes at a time."""


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    """At least 16: a tensor core's."""
    outputs: int
    piece: int
    """Input features taken at a time."""
    num_stages: int
    num_warps: int = 4

    def shared_memory(self, itemsize: int) -> int:
        """Bytes of the stages that are under way."""
        return (self.rows + self.outputs) * self.piece * itemsize * self.num_stages


def tile_of(num_rows: int, out_features: int, in_features: int, machine: Machine, itemsize: int) -> Tile:
    """From what was measured on an H100, by how many programs there are for its processors: few of them take the
    longest pieces, and as many as fit; many take short ones, several programs on a processor."""
    rows = max(16, triton.next_power_of_2(num_rows))
    if triton.cdiv(out_features, 32) <= machine.num_sms:
        outputs, piece, most_stages = 32, 256, 5
    elif triton.cdiv(out_features, 64) <= machine.num_sms:
        outputs, piece, most_stages = 64, 256 if rows <= 32 else 128, 5
    else:
        outputs, piece, most_stages = 64 if rows <= 32 else 32, 128, 4 if rows == 16 else 3
    piece = min(piece, max(16, triton.next_power_of_2(in_features)))
    tiles = [Tile(rows, outputs, piece, num_stages) for num_stages in range(most_stages, 1, -1)]
    most_memory = min(machine.shared_memory, MOST_MEMORY)
    return next((tile for tile in tiles if tile.shared_memory(itemsize) <= most_memory), tiles[-1])


@triton.jit
def _vector_kernel(
    x, weight, bias, out, K: tl.constexpr, PIECE: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """out[n] = weight[n] · x"""
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, PIECE)
    w = tl.load(weight + n * K + k, mask=k < K, other=0.0)
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    total = w.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    for start in range(PIECE, K, PIECE):
        k = start + tl.arange(0, PIECE)
        if K % PIECE == 0:
            total += tl.load(weight + n * K + k).to(tl.float32) * tl.load(x + k).to(tl.float32)
        else:
            w = tl.load(weight + n * K + k, mask=k < K, other=0.0)
            total += w.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    value = tl.sum(total)
    if HAS_BIAS:
        value += tl.load(bias + n).to(tl.float32)
    tl.store(out + n, value.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x, weight, bias, out, num_rows, x_stride, N, K,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Some output features of all rows. IS_EVEN: pieces fill K."""
    m = tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = m < num_rows, n < N
    # Features past the last are those of the last one: read without a mask, and not stored.
    w_rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    x_rows = x + m[:, None] * x_stride
    line = tl.arange(0, (PIECE + LINE - 1) // LINE)[None, :] * LINE
    for stage in tl.static_range(STAGES - 1):
        prefetch(w_rows + tl.minimum(stage * PIECE + line, K - 1), OVERLAPS)
    let_next_begin(OVERLAPS and IS_EARLY)
    wait_for_kernel_before(OVERLAPS)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, K, PIECE, num_stages=STAGES):
        k = start + tl.arange(0, PIECE)[None, :]
        if IS_EVEN:
            a = tl.load(x_rows + k, mask=is_row[:, None], other=0.0)
            b = tl.load(w_rows + k)
        else:
            a = tl.load(x_rows + k, mask=is_row[:, None] & (k < K), other=0.0)
            b = tl.load(w_rows + k, mask=k < K, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    let_next_begin(OVERLAPS and not IS_EARLY)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    places = out + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


class TritonLinear(PlainLinear):
    """See `LinearKernel`."""

    def __init__(self, spec: LinearSpec, machine: Machine, dtype: torch.dtype) -> None:
        self._out, self._in, self._machine = spec.out_features, spec.in_features, machine
        self._tiles = {
            rows: tile_of(rows, self._out, self._in, machine, dtype.itemsize) for rows in range(2, MOST_ROWS + 1)
        }

    def __call__(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        num_rows = len(x)
        if num_rows > MOST_ROWS or num_rows == 0:
            return super().__call__(x, packed, out)
        if out is None:
            out = x.new_empty(num_rows, self._out)
        if num_rows == 1:
            overlaps = self._machine.overlaps(1)
            bias = packed.weight if packed.bias is None else packed.bias
            _vector_kernel[(self._out,)](
                x, packed.weight, bias, out, self._in, VECTOR_PIECE, packed.bias is not None, overlaps,
                num_warps=8, **launch_options(overlaps),
            )  # fmt: skip
            return out
        self.launch(x, packed, out, self._tiles[num_rows])
        return out

    def launch(self, x: Tensor, packed: PackedLinear, out: Tensor, tile: Tile) -> None:
        """The product of several rows, with this tile."""
        overlaps = self._machine.overlaps(len(x))
        _rows_kernel[(triton.cdiv(self._out, tile.outputs),)](
            x, packed.weight, packed.weight if packed.bias is None else packed.bias, out,
            len(x), x.stride(0), self._out, self._in,
            tile.rows, tile.outputs, tile.piece, tile.num_stages, self._in % tile.piece == 0, packed.bias is not None,
            overlaps, len(x) > LATE_ROWS, num_warps=tile.num_warps, **launch_options(overlaps),
        )  # fmt: skip


def supports_linear(spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """float32 is for exact results: cuBLAS alone."""
    return spec.kind is Dense and dtype in (torch.bfloat16, torch.float16) and spec.in_features % 16 == 0
