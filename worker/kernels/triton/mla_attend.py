"""Absorbed latent attention: queries against the rows of the paged cache, which are keys and values at once.

A program has some tokens of a row and a block of heads, all of which read the same rows: each is read once for scores
and mixture. What is reduced, and how keys are split, is as in `gqa_attend`.
"""

import triton
import triton.language as tl

from worker.kernels.triton.gqa_attend import LOWEST, row_and_split, row_of_tile, share_of_split
from worker.kernels.triton.overlap import LINE_BYTES, let_next_begin, prefetch, wait_for_kernel_before


@triton.jit
def _add_keys(
    latents, ropes, best, total, mixed, start, end, positions, table, cache, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, IS_MASKED: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_CHOSEN: tl.constexpr,
):  # fmt: skip
    """The softmax's state with `KEYS` more rows of the cache. IS_CHOSEN: `table` has the slot of each, or −1; else the
    blocks."""
    key = start + tl.arange(0, KEYS)
    if IS_CHOSEN:
        slot = tl.load(table + key, mask=key < end, other=-1).to(tl.int64)
        is_key = slot >= 0
    elif IS_MASKED:
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + key % BLOCK_SIZE
        is_key = key < end
    else:
        slot = tl.load(table + key // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        is_key = key < end
    row = cache + (slot * (LATENT + ROPE))[:, None]
    n, p = tl.arange(0, LATENT)[None, :], tl.arange(0, ROPE)[None, :]
    if IS_MASKED:
        latent = tl.load(row + n, mask=is_key[:, None], other=0.0)
        rope = tl.load(row + LATENT + p, mask=is_key[:, None], other=0.0)
    else:
        latent = tl.load(row + n)
        rope = tl.load(row + LATENT + p)
    scores = tl.dot(ropes, tl.trans(rope), input_precision="ieee")
    scores = tl.dot(latents, tl.trans(latent), scores, input_precision="ieee") * scale
    if IS_MASKED:
        is_seen = is_key[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (key[None, :] <= positions[:, None])
        scores = tl.where(is_seen, scores, -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(latent.dtype), latent, mixed * shrink[:, None], input_precision="ieee")
    return new_best, total, mixed


@triton.jit
def _prefetch_keys(
    start, end, table, cache, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, LINES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The first `KEYS` rows from `start`, if they are before `end`: `ROW` numbers each, in at most `LINES`."""
    key = tl.maximum(tl.minimum(start + tl.arange(0, KEYS), end - 1), 0)
    slot = tl.load(table + key // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    element = tl.arange(0, LINES)[None, :] * (LINE_BYTES * 8 // cache.dtype.element_ty.primitive_bitwidth)
    prefetch(cache + (slot * ROW)[:, None] + tl.minimum(element, ROW - 1), OVERLAPS)


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "start", "num_places", "usual_splits", "table_stride", "head_stride"],
    do_not_specialize_on_alignment=["part_best", "part_total", "splits_by_row", "first_extra", "extra_rows"],
)
def attend_latents_kernel(
    q_latent, q_rope, cache, tables, out, part_mixed, part_best, part_total, query_starts, context_lens,
    splits_by_row, first_extra, extra_rows,
    scale, head_stride, table_stride, first_row, num_rows, start, num_places, usual_splits, top_k,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    IS_UNIFORM: tl.constexpr, HAS_EXTRA: tl.constexpr, IS_CHOSEN: tl.constexpr, LINES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a block of heads, tile of tokens and split of the keys.

    The launch is about `num_places` tokens of the step from `start` on: q_latent [H, T, L] with `head_stride`, q_rope
    [T, H, P], out [T, H, L]. IS_CHOSEN: `tables` has `top_k` slots for each token, of which a tile is one; else a row's
    blocks. IS_UNIFORM: rows have `TOKENS` tokens each, a tile a row; the second dimension of the grid is as in
    `row_and_split`. Else tiles follow `query_starts` from `first_row` on, and the third dimension is splits. LINES of
    memory that a row of the cache takes.
    """
    program = tl.program_id(1)
    if IS_CHOSEN:
        wait_for_kernel_before(OVERLAPS)  # for the one that chooses
        row, split, num_splits = program, tl.program_id(2), usual_splits
        first_token, num_tokens, row_start = 0, 1, program
        before = 0
    elif IS_UNIFORM:
        row, split, num_splits = row_and_split(
            program, num_rows, usual_splits, splits_by_row, first_extra, extra_rows, HAS_EXTRA
        )  # fmt: skip
        if row < 0:
            wait_for_kernel_before(OVERLAPS)
            return
        first_token, num_tokens, row_start = 0, TOKENS, row * TOKENS
        before = tl.load(context_lens + row) - num_tokens  # negative: a row of padding
    else:
        # The last tiles of a row have the most keys: they go first.
        row, tile = row_of_tile(tl.num_programs(1) - 1 - program, query_starts, first_row, num_rows, TOKENS)
        first_token = tile * TOKENS
        row_start = tl.load(query_starts + row)
        num_tokens = tl.load(query_starts + row + 1) - row_start
        num_splits, split = usual_splits, tl.program_id(2)
        before = tl.load(context_lens + row) - num_tokens
    if first_token >= num_tokens:
        wait_for_kernel_before(OVERLAPS)
        return
    end = top_k if IS_CHOSEN else before + tl.minimum(first_token + TOKENS, num_tokens)
    seen_by_all = (before + first_token + 1) // KEYS * KEYS  # up to the first query's own position
    share = share_of_split(0, end, num_splits, KEYS)
    begin = split * share
    end = tl.minimum(end, begin + share)
    if IS_UNIFORM and (num_splits > 1) & (begin >= end):
        wait_for_kernel_before(OVERLAPS)
        return
    table = tables + row.to(tl.int64) * table_stride
    if OVERLAPS and not IS_CHOSEN:
        _prefetch_keys(begin, end, table, cache, LATENT + ROPE, BLOCK_SIZE, KEYS, LINES, OVERLAPS)
    wait_for_kernel_before(OVERLAPS)

    i = tl.arange(0, QUERIES)
    token, head = first_token + i // HEADS, tl.program_id(0) * HEADS + i % HEADS
    is_query = (i < TOKENS * HEADS) & (token < num_tokens) & (head < NUM_HEADS)
    positions = before + token
    place = (row_start + token - start).to(tl.int64)
    n, p = tl.arange(0, LATENT)[None, :], tl.arange(0, ROPE)[None, :]
    latent_at = q_latent + (head.to(tl.int64) * head_stride + place * LATENT)[:, None] + n
    latents = tl.load(latent_at, mask=is_query[:, None], other=0.0)
    ropes = tl.load(q_rope + ((place * NUM_HEADS + head) * ROPE)[:, None] + p, mask=is_query[:, None], other=0.0)

    best = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, LATENT], tl.float32)
    if not IS_UNIFORM and not IS_CHOSEN:
        seen_by_all = tl.maximum(begin, tl.minimum(end, seen_by_all))
        for first_key in tl.range(begin, seen_by_all, KEYS, num_stages=STAGES):
            best, total, mixed = _add_keys(
                latents, ropes, best, total, mixed, first_key, end, positions, table, cache, scale,
                LATENT, ROPE, BLOCK_SIZE, KEYS, False, True, False,
            )  # fmt: skip
        begin = seen_by_all
    for first_key in tl.range(begin, end, KEYS, num_stages=STAGES):
        best, total, mixed = _add_keys(
            latents, ropes, best, total, mixed, first_key, end, positions, table, cache, scale,
            LATENT, ROPE, BLOCK_SIZE, KEYS, True, TOKENS > 1, IS_CHOSEN,
        )  # fmt: skip

    let_next_begin(OVERLAPS)
    if num_splits == 1:
        mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
        out_at = out + ((place * NUM_HEADS + head) * LATENT)[:, None] + n
        tl.store(out_at, mixed.to(out.dtype.element_ty), mask=is_query[:, None])
    else:
        part_place = (program * TOKENS + token).to(tl.int64) if IS_UNIFORM else split * num_places + place
        part = part_place * NUM_HEADS + head
        tl.store(part_mixed + part[:, None] * LATENT + n, mixed, mask=is_query[:, None])
        tl.store(part_best + part, best, mask=is_query)
        tl.store(part_total + part, total, mask=is_query)
