"""Narrows the search for a row's limit, where too many tokens lie within its bound, by all programs at once.

A pass adds up, tile by tile, what lies within each of a few limits: counts for a top-k, masses for a top-p. The sums
are integers, so the order does not matter. Every program of the next pass reads them, and so knows between which two
limits the row's lies. Three passes leave about 1/256 of an octave, which few tokens share. Other rows cost a load.
"""

import triton
import triton.language as tl

from worker.kernels.triton.sample_parts import measure

NUM_PASSES = 3
NUM_LIMITS = 16
"""That a pass looks at."""
NARROW_TILE = 4096

_NUM_LIMITS = tl.constexpr(NUM_LIMITS)
_NARROW_BLOCK = tl.constexpr(256)
_INTERVAL = tl.constexpr(3)
"""Numbers of an interval: low, high, and what lies within low."""
_FIRST_EXPONENT = tl.constexpr(127 - 8)
"""The first pass looks at the octaves from 2⁻⁸: no more than the next two can split lies below and above."""


@triton.jit
def has_top_k(top_k, vocab_size):
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def goal_of(top_k, top_p, total, vocab_size):
    """float64: what must lie within the limit that is searched for first."""
    goal = top_p * total.to(tl.float64)
    if has_top_k(top_k, vocab_size):
        goal = top_k.to(tl.float64)
    return goal


@triton.jit
def _limits_of(low, high, LEVEL: tl.constexpr):
    """Bits, rising, the last being `high`."""
    index = tl.arange(0, _NUM_LIMITS).to(tl.int64)
    if LEVEL == 0:
        limit = tl.minimum((index + _FIRST_EXPONENT) << 23, high)
        return tl.where(index == _NUM_LIMITS - 1, high, limit)
    return low + (high - low) * (index + 1) // _NUM_LIMITS


@triton.jit
def interval_of(intervals, sums, row, bound, goal, LEVEL: tl.constexpr):
    """(low, high, before, within), int64: the limit is above low and at most high, in bits; `before` lies within low,
    `within` within high (−1: not known). From the interval of the pass before, and what that added up."""
    low, high = tl.full([], -1, tl.int64), bound
    before, within = tl.zeros([], tl.int64), tl.full([], -1, tl.int64)
    if LEVEL > 0:
        last = (LEVEL - 1) * tl.num_programs(0) + row
        low, high = tl.load(intervals + last * _INTERVAL), tl.load(intervals + last * _INTERVAL + 1)
        before = tl.load(intervals + last * _INTERVAL + 2)
        limit = _limits_of(low, high, LEVEL - 1)
        reached = tl.load(sums + last * _NUM_LIMITS + tl.arange(0, _NUM_LIMITS))
        # Where all are short, as far as there is anything: the last.
        is_short = (reached.to(tl.float64) < goal) & (limit < high)
        within = tl.min(tl.where(is_short, tl.max(reached, 0), reached), 0)
        low = tl.maximum(low, tl.max(tl.where(is_short, limit, -1), 0))
        before = tl.maximum(before, tl.max(tl.where(is_short, reached, 0), 0))
        high = tl.min(tl.where(is_short, high, limit), 0)
    return low, high, before, within


@triton.jit
def store_interval(intervals, row, low, high, before, LEVEL: tl.constexpr):
    """By one program of the row."""
    if tl.program_id(1) == 0:
        place = intervals + (LEVEL * tl.num_programs(0) + row) * _INTERVAL
        tl.store(place, low)
        tl.store(place + 1, high)
        tl.store(place + 2, before)


@triton.jit
def narrow_kernel(
    logits, rows, integers, floats, slots, row_best, bounds, counts, totals, intervals, sums, stride, vocab_size,
    HAS_ROWS: tl.constexpr, LEVEL: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of rows with more than ROOM tokens within their bound."""
    row = tl.program_id(0)
    if tl.load(counts + row) > ROOM:
        source = row.to(tl.int64)
        if HAS_ROWS:
            source = tl.load(rows + row)
        slot = tl.load(slots + row)
        temperature = tl.load(floats + slot * 6).to(tl.float32)
        top_k, top_p = tl.load(integers + slot * 3), tl.load(floats + slot * 6 + 1)
        goal = goal_of(top_k, top_p, tl.load(totals + row), vocab_size)
        bound = tl.load(bounds + row).to(tl.int64)
        low, high, before, _ = interval_of(intervals, sums, row, bound, goal, LEVEL)
        store_interval(intervals, row, low, high, before, LEVEL)

        limit = _limits_of(low, high, LEVEL)
        best, start = tl.load(row_best + row), tl.program_id(1) * TILE
        tile, num = logits + source * stride + start, tl.minimum(vocab_size - start, TILE)
        if has_top_k(top_k, vocab_size):
            reached = measure(tile, num, best, temperature, limit, True, True, _NARROW_BLOCK, _NUM_LIMITS)
        else:
            reached = measure(tile, num, best, temperature, limit, True, False, _NARROW_BLOCK, _NUM_LIMITS)
        place = (LEVEL * tl.num_programs(0) + row) * _NUM_LIMITS + tl.arange(0, _NUM_LIMITS)
        tl.atomic_add(sums + place, reached)
