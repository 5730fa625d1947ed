"""Experts of more rows: products of tiles of sorted pairs with their expert, so that its weights are read once a tile.

The first product gathers its rows and gates; the second one leaves each pair's result in its own place; a sum of a
row's results, in the order of its choices, ends it.
"""

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from worker.kernels.triton.experts_sort import TILE_FIELDS
from worker.kernels.triton.gating import gated
from worker.kernels.triton.linear import LINE
from worker.kernels.triton.overlap import let_next_begin, prefetch, wait_for_kernel_before
from worker.kernels.triton.weight_tile import CENTRED, PLAIN, row_scale, weight_tile


@dataclass(frozen=True, slots=True)
class GroupedTile:
    rows: int
    """Pairs of one expert, at least 16."""
    features: int
    """Rows of the expert's weight."""
    piece: int
    num_stages: int
    num_warps: int
    band: int = 1
    """Tiles of pairs that are computed side by side, so that they find each other's weights in the L2 cache."""

    def shared_memory(self, itemsize: int) -> int:
        """Bytes of the stages that are under way."""
        return (self.rows + self.features) * self.piece * itemsize * self.num_stages

    def within(self, num_inputs: int, most_memory: int, itemsize: int) -> "GroupedTile":
        """For so many input features, and with as many stages as the memory has room for."""
        piece = min(self.piece, max(16, triton.next_power_of_2(num_inputs)))
        tiles = [replace(self, piece=piece, num_stages=stages) for stages in range(self.num_stages, 1, -1)]
        return next((tile for tile in tiles if tile.shared_memory(itemsize) <= most_memory), tiles[-1])


@triton.jit
def _in_bands(program, num_tiles, num_columns, BAND: tl.constexpr):
    """(tile, column) of a program: columns of a band of tiles, band by band."""
    first = program // (BAND * num_columns) * BAND
    size = tl.minimum(BAND, num_tiles - first)
    within = program % (BAND * num_columns)
    return first + within % size, within // size


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_kernel(
    x, pairs, tiles, weight, scales, bias, out, num_tiles, x_stride, alpha, limit, N, K,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr,
    BAND: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, GATE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[pair, n], of N, for a tile of pairs and some features. IS_GATED: x has a row for TOP_K pairs, and of an
    output's two features, weight[n] and weight[N + n], the gate is in an even column and the up behind it; otherwise x
    has a row for each pair. IS_EVEN: pieces fill K. FORM, GROUP, HAS_MINIMA: of the weight's numbers; see
    `weight_tile`."""
    num_columns = tl.cdiv(N * (1 + IS_GATED), FEATURES)
    tile, block = _in_bands(tl.program_id(0), num_tiles, num_columns, BAND)
    entry = tiles + tile * TILE_FIELDS
    if IS_GATED:
        # Behind the wait: whoever begins then finds the tables written.
        wait_for_kernel_before(OVERLAPS)
        let_next_begin(OVERLAPS)
    expert = tl.load(entry).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(entry + 1) + tl.arange(0, ROWS)
    is_row = place < tl.load(entry + 2)
    pair = tl.load(pairs + place, mask=is_row, other=0).to(tl.int64)
    column = tl.arange(0, FEATURES)
    # Outputs past the last are those of the last one: read without a mask, and not stored.
    if IS_GATED:
        feature = tl.minimum(block * (FEATURES // 2) + column // 2, N - 1) + column % 2 * N
        x_rows = x + (pair // TOP_K * x_stride)[:, None]
        row = expert * 2 * N + feature
        w_rows = weight + row[:, None] * K
    else:
        feature = tl.minimum(block * FEATURES + column, N - 1)
        x_rows = x + (pair * x_stride)[:, None]
        row = expert * N + feature
        w_rows = weight + row[:, None] * K
        if FORM == PLAIN:
            line = tl.arange(0, (PIECE + LINE - 1) // LINE)[None, :] * LINE
            for stage in tl.static_range(STAGES - 1):
                prefetch(w_rows + tl.minimum(stage * PIECE + line, K - 1), OVERLAPS)
        let_next_begin(OVERLAPS)
        wait_for_kernel_before(OVERLAPS)
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    for start in tl.range(0, K, PIECE, num_stages=STAGES):
        k = start + tl.arange(0, PIECE)[None, :]
        if IS_EVEN:
            a = tl.load(x_rows + k, mask=is_row[:, None], other=0.0)
        else:
            a = tl.load(x_rows + k, mask=is_row[:, None] & (k < K), other=0.0)
        if FORM != PLAIN:
            b, factor = weight_tile(weight, scales, row, start, K, PIECE, FORM, GROUP, HAS_MINIMA, x.dtype.element_ty)
        elif IS_EVEN:
            b = tl.load(w_rows + k)
        else:
            b = tl.load(w_rows + k, mask=k < K, other=0.0)
        if FORM == CENTRED:
            total += tl.dot(a, tl.trans(b)) * factor[None, :]
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if FORM != PLAIN:
        total *= row_scale(scales, row, GROUP)[None, :]
    if HAS_BIAS:
        first = expert * N * (1 + IS_GATED)
        total += tl.load(bias + first + feature).to(tl.float32)[None, :]
    if IS_GATED:
        gate, up = tl.split(tl.reshape(total, [ROWS, FEATURES // 2, 2]))
        n = block * (FEATURES // 2) + tl.arange(0, FEATURES // 2)
        result = gated(gate, up, alpha, limit, GATE)
    else:
        n = block * FEATURES + column
        result = total
    places = out + (pair * N)[:, None] + n[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=is_row[:, None] & (n < N)[None, :])


@triton.jit
def sum_kernel(
    x, ids, weights, out, first_expert, num_experts, N, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """out[row] = Σ weights[pair] × x[pair] over the row's pairs of this rank's experts. CHOICES: a power of two,
    from TOP_K."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next_begin(OVERLAPS)
    # Both were there before the first product began: it waited for them.
    choice = tl.arange(0, CHOICES)
    expert = tl.load(ids + row * TOP_K + choice, mask=choice < TOP_K, other=-1) - first_expert
    is_here = (choice < TOP_K) & (expert >= 0) & (expert < num_experts)
    share = tl.load(weights + row * TOP_K + choice, mask=is_here, other=0.0)
    wait_for_kernel_before(OVERLAPS)
    places = (row * TOP_K + choice)[:, None] * N + column[None, :]
    values = tl.load(x + places, mask=is_here[:, None] & (column < N)[None, :], other=0.0).to(tl.float32)
    total = tl.sum(values * share[:, None], 0)
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), mask=column < N)
