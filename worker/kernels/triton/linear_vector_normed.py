"""The product of one row of few input features with the norm before it, and the gate behind it.

Such a product has a few hundred instructions to do, and its norm is half of them if each warp has a part of it: here
each warp has the row and its norm whole, and some outputs for itself, so that no word goes between warps. It asks for
its part of the weight before it waits for the kernel before.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from worker.kernels.triton.linear_vector import silu_times
from worker.kernels.triton.machine import WARP_BYTES, Machine
from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before

WIDEST = 1024
"""Input features: of more, a row takes too many registers of each warp."""
HELD = 4096
"""Elements of the weight that a warp holds."""
MOST_TIMES = 4
FEW_WARPS, MANY_WARPS = 4, 8
LEAST_BUSY = 0.9
"""Share of the processors that one program each must keep busy, to be one of many warps."""


@dataclass(frozen=True, slots=True)
class NormedTile:
    num_warps: int
    times: int
    """Outputs of a warp."""
    piece: int
    """A power of two that holds the input features."""
    lanes: int
    """Of these, how many a warp loads at a time."""


def normed_tile(num_outputs: int, in_features: int, num_parts: int, itemsize: int, machine: Machine) -> NormedTile:
    """`num_parts`: rows of the weight for an output."""
    piece = triton.next_power_of_2(in_features)
    times = max(1, min(MOST_TIMES, HELD // (piece * num_parts)))
    while times > 1 and num_outputs < FEW_WARPS * times * machine.num_sms:
        times //= 2
    num_programs = triton.cdiv(num_outputs, MANY_WARPS * times)
    is_even = LEAST_BUSY * machine.num_sms <= num_programs <= machine.num_sms
    return NormedTile(MANY_WARPS if is_even else FEW_WARPS, times, piece, min(piece, WARP_BYTES // itemsize))


@triton.jit
def _load(at, k, K: tl.constexpr, PIECE: tl.constexpr):
    return tl.load(at + k) if K == PIECE else tl.load(at + k, mask=k < K, other=0.0)


@triton.jit
def _product(weight, x):
    """Of each warp's row of the weight and its copy of x: [WARPS]."""
    return tl.sum(tl.sum(weight.to(tl.float32) * x, 1), 1)


@triton.jit
def normed_vector_kernel(
    x, residual, norm_weight, new_residual, weight, bias, out, eps, N, K: tl.constexpr,
    WARPS: tl.constexpr, TIMES: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """As `vector_kernel` with a norm, of TIMES outputs for each of WARPS. Tensors are [WARPS, pieces, LANES]."""
    first = tl.program_id(0).to(tl.int64) * (WARPS * TIMES)
    warp = tl.arange(0, WARPS)
    k = tl.arange(0, PIECE // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    k += warp[:, None, None] * 0
    held, held_up = (), ()
    for time in tl.static_range(TIMES):
        n = tl.minimum(first + time * WARPS + warp, N - 1)[:, None, None]  # past the last: read, and not stored
        held += (_load(weight + n * K, k, K, PIECE),)  # type: ignore[assignment]
        if IS_GATED:
            held_up += (_load(weight + (N + n) * K, k, K, PIECE),)  # type: ignore[assignment]
    held_scales = _load(norm_weight, k, K, PIECE)
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    value = _load(x, k, K, PIECE).to(tl.float32) + _load(residual, k, K, PIECE).to(tl.float32)
    rounded = value.to(residual.dtype.element_ty)
    tl.store(new_residual + k, rounded, mask=(k < K) & (warp[:, None, None] == 0) & (first == 0))
    value = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(tl.sum(value * value, 1), 1) / K + eps)
    value *= held_scales.to(tl.float32)
    for time in tl.static_range(TIMES):
        output = first + time * WARPS + warp
        result = _product(held[time], value) * scale
        if HAS_BIAS:
            result += tl.load(bias + output, mask=output < N, other=0.0).to(tl.float32)
        if IS_GATED:
            up = _product(held_up[time], value) * scale
            if HAS_BIAS:
                up += tl.load(bias + N + output, mask=output < N, other=0.0).to(tl.float32)
            result = silu_times(result, up)
        tl.store(out + output, result.to(out.dtype.element_ty), mask=output < N)
