"""Experts of very few rows: a matrix-vector product for each pair of a row and an expert, and one sum for each row.

Rows that share an expert ask for its weights at the same time, so that the L2 cache has them for all but the first.
Neither product waits for sorting, and no sum depends on an order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from worker.kernels.triton.gating import gated
from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before


@dataclass(frozen=True, slots=True)
class PairTile:
    features: int
    """Outputs that a program computes."""
    piece: int
    """Elements of a weight's row that are taken at a time."""
    num_warps: int


@triton.jit
def gate_kernel(
    x, ids, weight, bias, out, x_stride, first_expert, num_experts, alpha, limit, N, K: tl.constexpr,
    TOP_K: tl.constexpr, FEATURES: tl.constexpr, PIECE: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[pair, n], of N: what expert ids[pair] makes of a row's gate and up, which are n and N + n of its weight."""
    pair = tl.program_id(0)
    wait_for_kernel_before(OVERLAPS)
    # Behind the wait: whoever begins then finds `ids` written.
    let_next_begin(OVERLAPS)
    expert = tl.load(ids + pair).to(tl.int64) - first_expert
    if (expert < 0) | (expert >= num_experts):
        return
    n = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    feature = tl.minimum(n, N - 1).to(tl.int64)
    gate_rows = weight + (expert * 2 * N + feature)[:, None] * K
    up_rows = gate_rows + N.to(tl.int64) * K
    row = x + (pair // TOP_K).to(tl.int64) * x_stride
    gate = tl.zeros([FEATURES, PIECE], tl.float32)
    up = tl.zeros([FEATURES, PIECE], tl.float32)
    for start in tl.static_range(0, K, PIECE):
        k = start + tl.arange(0, PIECE)[None, :]
        if start + PIECE <= K:
            g, u, value = tl.load(gate_rows + k), tl.load(up_rows + k), tl.load(row + k)
        else:
            g = tl.load(gate_rows + k, mask=k < K, other=0.0)
            u = tl.load(up_rows + k, mask=k < K, other=0.0)
            value = tl.load(row + k, mask=k < K, other=0.0)
        gate += g.to(tl.float32) * value.to(tl.float32)
        up += u.to(tl.float32) * value.to(tl.float32)
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if HAS_BIAS:
        gate_sum += tl.load(bias + expert * 2 * N + feature).to(tl.float32)
        up_sum += tl.load(bias + expert * 2 * N + N + feature).to(tl.float32)
    value = gated(gate_sum, up_sum, alpha, limit, GATE)
    tl.store(out + pair.to(tl.int64) * N + n, value.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def down_kernel(
    x, ids, weights, weight, bias, out, first_expert, num_experts, N, K: tl.constexpr, TOP_K: tl.constexpr,
    CHOICES: tl.constexpr, FEATURES: tl.constexpr, PIECE: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[row, n], of N: the weighted sum of what a row's experts make of x[pair]. CHOICES: a power of two, from TOP_K.

    The first pieces of the weights are asked for before the product that x comes from is done."""
    row = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, CHOICES)
    is_choice = choice < TOP_K
    expert = tl.load(ids + row * TOP_K + choice, mask=is_choice, other=-1).to(tl.int64) - first_expert
    is_here = is_choice & (expert >= 0) & (expert < num_experts)
    n = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    feature = tl.minimum(n, N - 1).to(tl.int64)
    w_rows = weight + ((tl.where(is_here, expert, 0) * N)[:, None] + feature[None, :])[:, :, None] * K
    x_rows = x + (row * TOP_K + choice)[:, None, None] * K
    inside = is_here[:, None, None]
    k = tl.arange(0, PIECE)[None, None, :]
    w = tl.load(w_rows + k, mask=inside & (k < K), other=0.0)
    share = tl.load(weights + row * TOP_K + choice, mask=is_here, other=0.0)
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    value = tl.load(x_rows + k, mask=inside & (k < K), other=0.0)
    total = w.to(tl.float32) * (value.to(tl.float32) * share[:, None, None])
    for start in tl.static_range(PIECE, K, PIECE):
        k = start + tl.arange(0, PIECE)[None, None, :]
        w = tl.load(w_rows + k, mask=inside & (k < K), other=0.0)
        value = tl.load(x_rows + k, mask=inside & (k < K), other=0.0)
        total += w.to(tl.float32) * (value.to(tl.float32) * share[:, None, None])
    result = tl.sum(tl.sum(total, 2), 0)
    if HAS_BIAS:
        places = (tl.where(is_here, expert, 0) * N)[:, None] + feature[None, :]
        biases = tl.load(bias + places, mask=is_here[:, None], other=0.0).to(tl.float32)
        result += tl.sum(biases * share[:, None], 0)
    tl.store(out + row * N + n, result.to(out.dtype.element_ty), mask=n < N)
