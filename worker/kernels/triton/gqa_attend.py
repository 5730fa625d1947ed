"""What the kernels of attention over the paged cache share: keys that are read once, in tiles, and parts put together.

A program has a tile of queries: some tokens of a row, and for each the heads that share a head of keys. Its softmax is
the online one, in powers of two. Where rows are few or long, several programs split a row's keys.
"""

import triton
import triton.language as tl

from worker.kernels.triton.overlap import LINE_BYTES, let_next_begin, prefetch, wait_for_kernel_before

LOWEST = tl.constexpr(-1.0e30)
"""In place of −∞ as the maximum of no scores: differences of it are numbers."""
LOG2_E = tl.constexpr(1.4426950408889634)
"""Scores are in powers of two."""


@triton.jit
def first_key(position, WINDOW: tl.constexpr):
    """The first that a query at `position` sees."""
    return tl.maximum(0, position - WINDOW + 1) if WINDOW > 0 else position * 0


@triton.jit
def share_of_split(begin, end, num_splits, KEYS: tl.constexpr):
    """Keys of a split, a multiple of `KEYS`."""
    return tl.maximum(tl.cdiv(tl.cdiv(end - begin, KEYS), num_splits), 1) * KEYS


@triton.jit
def add_keys(
    queries, best, total, mixed, start, end, positions, kv_head, table, k_cache, v_cache, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, IS_MASKED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """The softmax's state with `KEYS` more keys from `start`. IS_MASKED: not all of them are seen by all queries."""
    key = start + tl.arange(0, KEYS)
    d, w = tl.arange(0, DIM)[None, :], tl.arange(0, WIDTH)[None, :]
    block = (
        tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
        if IS_MASKED
        else tl.load(table + key // BLOCK_SIZE).to(tl.int64)
    )
    entry = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE)[:, None]
    if IS_MASKED or DIM != HEAD_DIM:
        k = tl.load(k_cache + entry * HEAD_DIM + d, mask=(key < end)[:, None] & (d < HEAD_DIM), other=0.0)
    else:
        k = tl.load(k_cache + entry * HEAD_DIM + d)
    if IS_MASKED or WIDTH != VALUE_DIM:
        v = tl.load(v_cache + entry * VALUE_DIM + w, mask=(key < end)[:, None] & (w < VALUE_DIM), other=0.0)
    else:
        v = tl.load(v_cache + entry * VALUE_DIM + w)
    k, v = k.to(queries.dtype), v.to(queries.dtype)  # of float8, perhaps
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    if IS_MASKED:
        is_seen = (key < end)[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (key[None, :] <= positions[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return new_best, total, mixed


@triton.jit
def prefetch_keys(
    start, end, kv_head, table, k_cache, v_cache,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, LINES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The first `KEYS` from `start`, if they are before `end`, and their values."""
    key = tl.maximum(tl.minimum(start + tl.arange(0, KEYS), end - 1), 0)
    block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
    d = tl.arange(0, LINES)[None, :] * (LINE_BYTES * 8 // k_cache.dtype.element_ty.primitive_bitwidth)
    entry = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE)[:, None]
    prefetch(k_cache + entry * HEAD_DIM + tl.minimum(d, HEAD_DIM - 1), OVERLAPS)
    prefetch(v_cache + entry * VALUE_DIM + tl.minimum(d, VALUE_DIM - 1), OVERLAPS)


@triton.jit
def with_sink(best, total, sink):
    """Maximum and sum with one more score, and what the values mixed so far are multiplied by."""
    new_best = tl.maximum(best, sink)
    shrink = tl.exp2(best - new_best)
    return total * shrink + tl.exp2(sink - new_best), shrink


@triton.jit
def store_mixed(
    out, sinks, best, total, mixed, place, head, is_query,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """What attention makes of queries: values mixed [QUERIES, WIDTH] over the softmax's sum, to where `out` has a
    token's `place` and a head."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        total, shrink = with_sink(best, total, sink)
        mixed *= shrink[:, None]
    mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
    w = tl.arange(0, WIDTH)
    out_at = out + (place.to(tl.int64) * NUM_HEADS + head)[:, None] * VALUE_DIM + w[None, :]
    tl.store(out_at, mixed.to(out.dtype.element_ty), mask=is_query[:, None] & (w < VALUE_DIM)[None, :])


@triton.jit
def row_and_split(program, num_rows, usual_splits, splits_by_row, first_extra, extra_rows, HAS_EXTRA: tl.constexpr):
    """(row, or -1 where there is nothing to do; split; number of the row's splits) of a program of uniform rows: for
    each of the usual splits all rows, then the extra ones (see `gqa_splits`)."""
    row, split, num_splits = program % num_rows, program // num_rows, usual_splits
    if HAS_EXTRA:
        extra = program - usual_splits * num_rows
        if extra >= 0:
            row = -1
            if extra < tl.load(extra_rows):
                row = tl.load(extra_rows + 1 + extra)
                split = usual_splits + extra - tl.load(first_extra + row)
        if row >= 0:
            num_splits = tl.load(splits_by_row + row)
    return row, split, num_splits


@triton.jit
def row_of_tile(tile, query_starts, first_row, num_rows, TOKENS: tl.constexpr):
    """(row, tile within it) of rows that begin a new tile each: the last whose first tile is not behind `tile`."""
    first_token = tl.load(query_starts + first_row)
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = (tl.load(query_starts + first_row + middle) - first_token) // TOKENS + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    first_tile = (tl.load(query_starts + first_row + low) - first_token) // TOKENS + low
    return first_row + low, tile - first_tile


@triton.jit(
    do_not_specialize=["num_places", "usual_splits"],
    do_not_specialize_on_alignment=["part_best", "part_total", "splits_by_row", "first_extra", "extra_rows"],
)
def reduce_kernel(
    sinks, out, part_mixed, part_best, part_total, context_lens, splits_by_row, first_extra, extra_rows,
    num_places, usual_splits,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, IS_UNIFORM: tl.constexpr,
    HAS_EXTRA: tl.constexpr, IS_EXTRA_ONLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a token and head: the parts of splits together, in the order of the keys, SPLITS of them at a
    time. `out` begins with the launch's first token.

    IS_EXTRA_ONLY: rows are whole but for those with extra programs, and the grid is over these: the first of each row
    does the work.
    """
    let_next_begin(OVERLAPS)
    place, head = tl.program_id(0), tl.program_id(1)
    if IS_EXTRA_ONLY:
        extra = place // TOKENS
        if extra >= tl.load(extra_rows):
            wait_for_kernel_before(OVERLAPS)
            return
        row = tl.load(extra_rows + 1 + extra)
        if tl.load(first_extra + row) != extra:
            wait_for_kernel_before(OVERLAPS)
            return
        place = row * TOKENS + place % TOKENS
    row, token = place // TOKENS, place % TOKENS
    num_parts, first_extra_place = usual_splits, 0
    if IS_UNIFORM:
        num_splits = usual_splits
        if HAS_EXTRA:
            num_splits = tl.load(splits_by_row + row)
            first_extra_place = usual_splits * num_places + tl.load(first_extra + row) * TOKENS + token
        end = tl.load(context_lens + row)
        begin = first_key(end - TOKENS, WINDOW) // KEYS * KEYS
        num_parts = tl.cdiv(end - begin, share_of_split(begin, end, num_splits, KEYS))
    wait_for_kernel_before(OVERLAPS)
    w = tl.arange(0, WIDTH)
    best, total, result = LOWEST, 0.0, tl.zeros([WIDTH], tl.float32)
    for start in range(0, num_parts, SPLITS):
        split = start + tl.arange(0, SPLITS)
        places = split * num_places + place
        if HAS_EXTRA:
            places = tl.where(split < usual_splits, places, first_extra_place + (split - usual_splits) * TOKENS)
        part = places.to(tl.int64) * NUM_HEADS + head
        is_part = split < num_parts
        bests = tl.load(part_best + part, mask=is_part, other=LOWEST)
        totals = tl.load(part_total + part, mask=is_part, other=0.0)
        is_element = is_part[:, None] & (w < VALUE_DIM)[None, :]
        mixed = tl.load(part_mixed + part[:, None] * VALUE_DIM + w[None, :], mask=is_element, other=0.0)
        new_best = tl.maximum(best, tl.max(bests, 0))
        shrink, weights = tl.exp2(best - new_best), tl.exp2(bests - new_best)
        total = total * shrink + tl.sum(totals * weights, 0)
        result = result * shrink + tl.sum(mixed * weights[:, None], 0)
        best = new_best
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total, shrink = with_sink(best, total, sink)
        result *= shrink
    result = result / tl.where(total == 0, 1.0, total)
    out_at = out + (place.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + w
    tl.store(out_at, result.to(out.dtype.element_ty), mask=w < VALUE_DIM)
