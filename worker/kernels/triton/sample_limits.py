"""Top-k, top-p and min-p without sorting: each row's limit, the largest distance from its best logit that stays.

Few tokens can be near the threshold. A bound on the limit comes from what is known of the row's chunks: the k-th best
chunk has k tokens at or above its best; tokens that each hold less than a share of (1 − p) / V cannot hold 1 − p
together. What lies within the bound is collected, and the limit is searched for there, digit by digit of its bits. If
more lies there than room was made for, the bound becomes an interval (`sample_narrow`), and what lies in that is
collected.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.sampling import CHUNK, DrawRules
from worker.kernels.triton.sample_narrow import (
    NARROW_TILE,
    NUM_LIMITS,
    NUM_PASSES,
    goal_of,
    has_top_k,
    interval_of,
    narrow_kernel,
    store_interval,
)
from worker.kernels.triton.sample_parts import (
    bits_of,
    distance_of,
    find_limit,
    is_drawn,
    load_logits,
    mass_of,
    measure,
)

ROOM = 8192
"""Candidates of a row that are kept."""
COLLECT_TILE = 2048
SEARCH_TILE = 1024
KEPT_CHUNKS = 16
"""Chunks that a program adds up."""

NO_LIMIT = 0x7F800000
"""Bits of infinity."""
_CHUNK = tl.constexpr(CHUNK)
_NO_LIMIT = tl.constexpr(NO_LIMIT)
_NUM_PASSES = tl.constexpr(NUM_PASSES)
_SMALLEST_REST = tl.constexpr(1e-6)
"""A top-p nearer to 1 has no bound: what it leaves out may be a rounding error."""


@triton.jit
def _bound_kernel(
    chunk_best, chunk_mass, integers, floats, slots, row_best, bounds, limits, counts, totals,
    vocab_size, num_chunks, PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program a row: its best logit, its limit by min-p, and the bound (−1: it has neither top-k nor top-p). What is
    infinitely far has no mass and is never looked at."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    temperature = tl.load(floats + slot * 6).to(tl.float32)
    top_p, min_p = tl.load(floats + slot * 6 + 1), tl.load(floats + slot * 6 + 2)
    top_k = tl.load(integers + slot * 3)
    chunk = tl.arange(0, PAD)
    bests = tl.load(chunk_best + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    best = tl.max(bests)
    limit, bound = tl.full([], _NO_LIMIT, tl.int64), tl.full([], -1, tl.int64)
    if is_drawn(temperature) & (tl.abs(best) < float("inf")):
        if min_p > 0:
            limit = bits_of(tl.abs(tl.log(min_p).to(tl.float32))).to(tl.int64)
        if has_top_k(top_k, vocab_size) | (top_p < 1):
            bound = tl.full([], _NO_LIMIT - 1, tl.int64)
            if has_top_k(top_k, vocab_size):
                if top_k <= num_chunks:
                    bound = find_limit(
                        chunk_best + row * num_chunks, num_chunks, best, temperature, top_k.to(tl.float64), 0, bound,
                        True, True, TILE,
                    )  # fmt: skip
            elif 1 - top_p > _SMALLEST_REST:
                mass = tl.load(chunk_mass + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
                total = tl.sum(mass * tl.exp(-distance_of(bests, best, temperature)))
                least = (1 - top_p) / 2 * total.to(tl.float64) / vocab_size
                bound = bits_of(tl.abs(tl.log(least).to(tl.float32))).to(tl.int64)
    tl.store(row_best + row, best)
    tl.store(limits + row, limit.to(tl.int32))
    tl.store(bounds + row, bound.to(tl.int32))
    tl.store(counts + row, 0)
    tl.store(counts + tl.num_programs(0) + row, 0)
    tl.store(totals + row, tl.zeros([], tl.int64))


@triton.jit
def _collect_kernel(
    logits, rows, integers, floats, slots, row_best, bounds, counts, totals, candidates, intervals, sums,
    stride, vocab_size, HAS_ROWS: tl.constexpr, IS_NARROWED: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Distances within the row's bound, in any order, and the mass of the whole row. IS_NARROWED: within the interval,
    of rows that had too many."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    low, high = tl.full([], -1, tl.int64), tl.load(bounds + row).to(tl.int64)
    is_wanted = high >= 0
    if IS_NARROWED:
        is_wanted = tl.load(counts + row) > ROOM
    if is_wanted:
        source = row.to(tl.int64)
        if HAS_ROWS:
            source = tl.load(rows + row)
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        is_there = token < vocab_size
        slot = tl.load(slots + row)
        temperature = tl.load(floats + slot * 6).to(tl.float32)
        x = load_logits(logits + source * stride, token, is_there)
        distance = distance_of(x, tl.load(row_best + row), temperature)
        if IS_NARROWED:
            top_k, top_p = tl.load(integers + slot * 3), tl.load(floats + slot * 6 + 1)
            goal = goal_of(top_k, top_p, tl.load(totals + row), vocab_size)
            low, high, before, within = interval_of(intervals, sums, row, high, goal, _NUM_PASSES)
            if has_top_k(top_k, vocab_size) & (within <= ROOM):
                # All that a top-p after it may have to look at.
                low, before = low * 0 - 1, before * 0
            store_interval(intervals, row, low, high, before, _NUM_PASSES)
            counts += num_rows
        else:
            tl.atomic_add(totals + row, tl.sum(tl.where(is_there, mass_of(distance), 0)))
        is_near = is_there & (bits_of(distance) > low) & (bits_of(distance) <= high)
        before = tl.cumsum(is_near.to(tl.int32), 0) - is_near.to(tl.int32)
        place = tl.atomic_add(counts + row, tl.sum(is_near.to(tl.int32))) + before
        tl.store(candidates + row.to(tl.int64) * ROOM + place, distance, mask=is_near & (place < ROOM))


@triton.jit
def _limit_among(
    source, num, best, temperature, top_k, top_p, total, before, bound, vocab_size,
    IS_LOGITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """With both a top-k and a top-p, nothing lies before what is searched."""
    limit = bound
    if has_top_k(top_k, vocab_size):
        goal = top_k.to(tl.float64)
        limit = find_limit(source, num, best, temperature, goal, before, bound, IS_LOGITS, True, TILE)
        if top_p < 1:
            # Of two equal limits one is enough.
            kept = measure(source, num, best, temperature, limit + tl.zeros([2], tl.int64), IS_LOGITS, False, TILE, 2)
            total = tl.max(kept, 0)
    if top_p < 1:
        goal = top_p * total.to(tl.float64)
        limit = find_limit(source, num, best, temperature, goal, before, limit, IS_LOGITS, False, TILE)
    return limit


@triton.jit
def _limit_kernel(
    logits, rows, integers, floats, slots, row_best, bounds, limits, counts, totals, candidates, intervals, stride,
    vocab_size, HAS_ROWS: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    bound = tl.load(bounds + row).to(tl.int64)
    if bound >= 0:
        slot = tl.load(slots + row)
        temperature = tl.load(floats + slot * 6).to(tl.float32)
        top_k, top_p = tl.load(integers + slot * 3), tl.load(floats + slot * 6 + 1)
        best, num, total = tl.load(row_best + row), tl.load(counts + row), tl.load(totals + row)
        before, is_collected = tl.zeros([], tl.int64), num <= ROOM
        if num > ROOM:
            interval = intervals + (_NUM_PASSES * num_rows + row) * 3
            num = tl.load(counts + num_rows + row)
            is_collected = num <= ROOM
            if has_top_k(top_k, vocab_size) & (top_p < 1):
                is_collected = is_collected & (tl.load(interval) < 0)
            if is_collected:
                bound, before = tl.load(interval + 1), tl.load(interval + 2)
        if is_collected:
            near = candidates + row.to(tl.int64) * ROOM
            limit = _limit_among(
                near, num, best, temperature, top_k, top_p, total, before, bound, vocab_size, False, TILE
            )
        else:
            # Thousands of tokens all but tie, or are what a top-k leaves to a top-p: slower, and the same.
            source = row.to(tl.int64)
            if HAS_ROWS:
                source = tl.load(rows + row)
            whole = logits + source * stride
            limit = _limit_among(
                whole, vocab_size, best, temperature, top_k, top_p, total, before, bound, vocab_size, True, TILE
            )
        tl.store(limits + row, tl.minimum(limit, tl.load(limits + row).to(tl.int64)).to(tl.int32))


@triton.jit
def _kept_kernel(
    logits, rows, floats, slots, row_best, limits, chunk_mass, stride, vocab_size, num_chunks,
    HAS_ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of a row with a limit: each chunk's mass within it, in place of the whole."""
    row = tl.program_id(0)
    limit = tl.load(limits + row)
    if limit < _NO_LIMIT:
        source = row.to(tl.int64)
        if HAS_ROWS:
            source = tl.load(rows + row)
        chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
        token = chunk[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
        temperature = tl.load(floats + tl.load(slots + row) * 6).to(tl.float32)
        x = load_logits(logits + source * stride, token, token < vocab_size)
        distance = distance_of(x, tl.load(row_best + row), temperature)
        kept = tl.sum(tl.where(bits_of(distance) <= limit, tl.exp(-distance), 0.0), 1)
        tl.store(chunk_mass + row * num_chunks + chunk, kept, mask=chunk < num_chunks)


def find_limits(
    logits: Tensor, rows: Tensor | None, rules: DrawRules, integers: Tensor, floats: Tensor, slots: Tensor,
    chunk_best: Tensor, chunk_mass: Tensor,
) -> Tensor:  # fmt: skip
    """int32 [R]: bits of the largest distance that stays in each row, NO_LIMIT where all do.

    chunk_best, chunk_mass float32 [R, chunks]: see `worker.kernels.triton.sample`; a truncated row's masses are
    replaced by those of what stays, relative to the row's best.
    """
    (num_rows, num_chunks), vocab_size = chunk_best.shape, logits.shape[1]
    new = logits.new_empty
    row_best, totals = new(num_rows, dtype=torch.float32), new(num_rows, dtype=torch.int64)
    bounds, limits, counts = (new(num, dtype=torch.int32) for num in (num_rows, num_rows, 2 * num_rows))
    pad, stride = triton.next_power_of_2(num_chunks), logits.stride(0)
    _bound_kernel[(num_rows,)](
        chunk_best, chunk_mass, integers, floats, slots, row_best, bounds, limits, counts, totals,
        vocab_size, num_chunks, pad, min(pad, SEARCH_TILE), num_warps=4,
    )  # fmt: skip
    if rules.most_top_k or rules.has_top_p:
        candidates = new(num_rows, ROOM, dtype=torch.float32)
        intervals = new(NUM_PASSES + 1, num_rows, 3, dtype=torch.int64)
        sums = logits.new_zeros(NUM_PASSES, num_rows, NUM_LIMITS, dtype=torch.int64)
        of_rows = (logits, rows, integers, floats, slots, row_best, bounds)

        def collect(is_narrowed: bool) -> None:
            _collect_kernel[(num_rows, triton.cdiv(vocab_size, COLLECT_TILE))](
                *of_rows, counts, totals, candidates, intervals, sums, stride, vocab_size,
                rows is not None, is_narrowed, ROOM, COLLECT_TILE, num_warps=4,
            )  # fmt: skip

        collect(False)
        for level in range(NUM_PASSES):
            narrow_kernel[(num_rows, triton.cdiv(vocab_size, NARROW_TILE))](
                *of_rows, counts, totals, intervals, sums, stride, vocab_size,
                rows is not None, level, ROOM, NARROW_TILE, num_warps=4,
            )  # fmt: skip
        collect(True)
        _limit_kernel[(num_rows,)](
            *of_rows, limits, counts, totals, candidates, intervals, stride, vocab_size,
            rows is not None, ROOM, SEARCH_TILE, num_warps=4,
        )  # fmt: skip
    _kept_kernel[(num_rows, triton.cdiv(num_chunks, KEPT_CHUNKS))](
        logits, rows, floats, slots, row_best, limits, chunk_mass, stride, vocab_size, num_chunks,
        rows is not None, KEPT_CHUNKS, num_warps=4,
    )  # fmt: skip
    return limits
