"""The product of a few rows with a small weight, which takes less time to read than kernels take to follow each other.

A program asks for its whole part of the weight before it waits for the kernel before, and lets the next one do so at
once. Each warp has a share of the input features: products of one warp wait for each other, and a sum over all input
features would be one chain of them.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from worker.kernels.triton.linear_rows import features_of_program, outbox_of, store_sums
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before

ROWS = 16
"""A tensor core's, and the most that such a product has."""
TAKEN = 1024
"""Input features that are multiplied at a time, if there are as many."""
HELD = 8192
"""Elements of the weight that a warp holds: half of its registers."""
RESIDENT = 8
"""Such warps that a multiprocessor runs at a time."""
FEATURES = 32, 16
"""Rows of the weight that a program may have."""


@dataclass(frozen=True, slots=True)
class HeldTile:
    features: int
    piece: int
    """Input features of a warp's share that are multiplied at a time."""
    num_held: int
    """Such pieces of a share."""
    num_warps: int


def held_tile(out_features: int, in_features: int, machine: Machine) -> HeldTile | None:
    """The one of most features that leaves few multiprocessors without a program; None where programs would not run all
    at a time, and so the weight is read in pieces as fast."""
    num_held = triton.cdiv(in_features, TAKEN)
    for features in FEATURES:
        num_warps = max(4, triton.next_power_of_2(triton.cdiv(features * num_held * TAKEN, HELD)))
        num_programs = triton.cdiv(out_features, features)
        if num_warps > RESIDENT or num_programs > RESIDENT // num_warps * machine.num_sms:
            continue
        if features == FEATURES[-1] or num_programs >= 3 * machine.num_sms // 4:
            piece = max(16, min(TAKEN, triton.next_power_of_2(in_features)) // num_warps)
            return HeldTile(features, piece, num_held, num_warps)
    return None


@triton.jit(do_not_specialize=["num_rows"])
def held_kernel(
    x, weight, bias, out, inboxes, turns, message_stride, num_rows, x_stride, out_stride, N, K: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, SHARES: tl.constexpr, PIECE: tl.constexpr, NUM_HELD: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some of N outputs of all rows. PIECE: of each warp's share. IS_GATED: see `features_of_program`."""
    IS_EVEN: tl.constexpr = K % (SHARES * PIECE) == 0
    m = tl.arange(0, ROWS)
    is_row = (m < num_rows)[None, :, None]
    feature = features_of_program(N, FEATURES, IS_GATED)
    k = tl.arange(0, SHARES)[:, None, None] * PIECE + tl.arange(0, PIECE)[None, None, :]
    w_rows = weight + (feature * K)[None, :, None]
    x_rows = x + (m * x_stride)[None, :, None]
    held = ()
    for start in tl.static_range(0, NUM_HELD * SHARES * PIECE, SHARES * PIECE):
        if IS_EVEN:
            held += (tl.load(w_rows + start + k),)  # type: ignore[assignment]
        else:
            held += (tl.load(w_rows + start + k, mask=start + k < K, other=0.0),)  # type: ignore[assignment]
    let_next_begin(OVERLAPS and SIZE == 1)
    wait_for_kernel_before(OVERLAPS)
    let_next_begin(OVERLAPS and SIZE > 1)  # see `sum_norm`
    outbox = outbox_of(inboxes, turns, num_rows, ROWS, SIZE)
    sums = tl.zeros([SHARES, ROWS, FEATURES], tl.float32)
    for i in tl.static_range(NUM_HELD):
        at = i * SHARES * PIECE + k
        a = tl.load(x_rows + at, mask=is_row if IS_EVEN else is_row & (at < K), other=0.0)
        sums = tl.dot(a, tl.permute(held[i], (0, 2, 1)), sums, input_precision="ieee")
    store_sums(
        tl.sum(sums, 0), feature, bias, out, num_rows, out_stride, N, outbox, message_stride,
        ROWS, FEATURES, HAS_BIAS, IS_GATED, RANK, SIZE,
    )  # fmt: skip
