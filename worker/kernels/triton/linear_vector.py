"""The product of one row, which is bound by reading the weight, with the norm before it and the gate behind it.

Of few input features a program has some outputs, and asks for its whole part of the weight before it waits for the
kernel before: such a weight is read faster than kernels follow each other. Of many, each output is a program, and they
follow each other.
"""

import math
from dataclasses import dataclass

import triton
import triton.language as tl

from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before

PIECE = 1024
"""Input features that are taken at a time."""
HELD = 12288
"""Elements of the weight that a program of four warps holds."""
FEWEST = 2
"""Programs that a multiprocessor should have, about."""
WIDEST = 3072
"""Input features of such a program. Of more, a weight is so large that short programs are as good or better."""


@dataclass(frozen=True, slots=True)
class VectorTile:
    outputs: int
    """Of a program."""
    piece: int
    num_held: int
    """Pieces that are asked for at first."""
    num_warps: int


def vector_tile(num_outputs: int, in_features: int, num_parts: int, machine: Machine) -> VectorTile:
    """`num_parts`: rows of the weight for an output."""
    if in_features > WIDEST:
        return VectorTile(1, PIECE, 1, 8)
    piece = min(PIECE, triton.next_power_of_2(in_features))
    num_held = triton.cdiv(in_features, piece)
    most = HELD // (num_parts * num_held * piece)
    outputs = min(1 << (most.bit_length() - 1), _nearest_power(num_outputs / (FEWEST * machine.num_sms)))
    return VectorTile(outputs, piece, num_held, 4)


def _nearest_power(number: float) -> int:
    """Of two, by ratio; at least 1."""
    return 1 << max(0, round(math.log2(number)))


@triton.jit
def silu_times(gate, up):
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def _weight_piece(row, k, K: tl.constexpr, IS_EVEN: tl.constexpr):
    return tl.load(row + k[None, :]) if IS_EVEN else tl.load(row + k[None, :], mask=(k < K)[None, :], other=0.0)


@triton.jit
def _input_piece(
    x, residual, scales, new_residual, k, K: tl.constexpr, HAS_NORM: tl.constexpr, IS_FIRST
):  # fmt: skip
    """(the input of a product at k, up to the norm's scale; what it adds to the norm's sum of squares)"""
    inside = k < K
    value = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if not HAS_NORM:
        return value, value
    value += tl.load(residual + k, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(residual.dtype.element_ty)
    tl.store(new_residual + k, rounded, mask=inside & IS_FIRST)
    value = rounded.to(tl.float32)
    return value * scales.to(tl.float32), value * value


@triton.jit
def _norm_piece(norm_weight, k, K: tl.constexpr, HAS_NORM: tl.constexpr):
    return tl.load(norm_weight + k, mask=k < K, other=0.0) if HAS_NORM else k


@triton.jit
def vector_kernel(
    x, residual, norm_weight, new_residual, weight, bias, out, eps, N, K: tl.constexpr,
    OUTPUTS: tl.constexpr, PIECE: tl.constexpr, NUM_HELD: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_EARLY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[n] = weight[n] · x, of N outputs; gated with weight[N + n] · x. HAS_NORM: of the norm of x + residual, whose
    scale is a factor of the result; the first program leaves the sum. IS_EARLY: the next kernel may begin at once."""
    let_next_begin(OVERLAPS and IS_EARLY)
    IS_EVEN: tl.constexpr = K % PIECE == 0
    first = tl.program_id(0).to(tl.int64) * OUTPUTS
    is_first = first == 0
    output = first + tl.arange(0, OUTPUTS)
    n = tl.minimum(output, N - 1)  # past the last: read, and not stored
    gate_row = weight + n[:, None] * K
    up_row = weight + (N + n)[:, None] * K
    held, held_up, held_scales = (), (), ()
    for start in tl.static_range(0, NUM_HELD * PIECE, PIECE):
        k = start + tl.arange(0, PIECE)
        held += (_weight_piece(gate_row, k, K, IS_EVEN),)  # type: ignore[assignment]
        held_scales += (_norm_piece(norm_weight, k, K, HAS_NORM),)  # type: ignore[assignment]
        if IS_GATED:
            held_up += (_weight_piece(up_row, k, K, IS_EVEN),)  # type: ignore[assignment]
    let_next_begin(OVERLAPS and not IS_EARLY)
    wait_for_kernel_before(OVERLAPS)
    squares = tl.zeros([PIECE], tl.float32)
    pieces = ()
    for i in tl.static_range(NUM_HELD):
        k = i * PIECE + tl.arange(0, PIECE)
        piece, more_squares = _input_piece(x, residual, held_scales[i], new_residual, k, K, HAS_NORM, is_first)
        pieces += (piece,)  # type: ignore[assignment]
        squares += more_squares
    # Not from zeros on, which would be an addition of each element.
    total = held[0].to(tl.float32) * pieces[0][None, :]  # type: ignore[misc]
    total_up = held_up[0].to(tl.float32) * pieces[0][None, :] if IS_GATED else total  # type: ignore[misc]
    for i in tl.static_range(1, NUM_HELD):
        total += held[i].to(tl.float32) * pieces[i][None, :]
        if IS_GATED:
            total_up += held_up[i].to(tl.float32) * pieces[i][None, :]
    for start in range(NUM_HELD * PIECE, K, PIECE):
        k = start + tl.arange(0, PIECE)
        gates = _weight_piece(gate_row, k, K, IS_EVEN)
        scales = _norm_piece(norm_weight, k, K, HAS_NORM)
        piece, more_squares = _input_piece(x, residual, scales, new_residual, k, K, HAS_NORM, is_first)
        squares += more_squares
        total += gates.to(tl.float32) * piece[None, :]
        if IS_GATED:
            total_up += _weight_piece(up_row, k, K, IS_EVEN).to(tl.float32) * piece[None, :]
    scale = 1.0
    if HAS_NORM:
        scale = 1 / tl.sqrt(tl.sum(squares) / K + eps)
    value = tl.sum(total, 1) * scale
    if HAS_BIAS:
        value += tl.load(bias + n).to(tl.float32)
    if IS_GATED:
        up = tl.sum(total_up, 1) * scale
        if HAS_BIAS:
            up += tl.load(bias + N + n).to(tl.float32)
        value = silu_times(value, up)
    tl.store(out + output, value.to(out.dtype.element_ty), mask=output < N)
