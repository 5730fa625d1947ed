"""Attention of chunks of prompts over the paged cache: tiles of queries, each of tokens of one row."""

import triton
import triton.language as tl

from worker.kernels.triton.gqa_attend import (
    LOWEST,
    add_keys,
    first_key,
    prefetch_keys,
    row_of_tile,
    share_of_split,
    store_mixed,
)
from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "start", "num_places", "skipped", "num_splits"],
    do_not_specialize_on_alignment=["part_best", "part_total"],
)
def attend_chunks_kernel(
    q, k_cache, v_cache, sinks, out, part_mixed, part_best, part_total, query_starts, context_lens, block_tables,
    scale, v_scale, q_stride, table_stride, first_row, num_rows, start, num_places, skipped, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    LINES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a tile of queries, head of keys and split of the keys.

    Tiles of `TOKENS` tokens follow `query_starts` from `first_row` on, leaving out the first `skipped` tokens of a row.
    The launch is about `num_places` tokens of the step from `start` on. LINES of memory that a key takes.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    kv_head, split = tl.program_id(1), tl.program_id(2)
    # The last tiles of a row have the most keys: they go first.
    row, tile = row_of_tile(
        tl.num_programs(0) - 1 - tl.program_id(0), query_starts, first_row, num_rows, TOKENS
    )  # fmt: skip
    first_token = skipped + tile * TOKENS
    row_start = tl.load(query_starts + row)
    num_tokens = tl.load(query_starts + row + 1) - row_start
    if first_token >= num_tokens:
        wait_for_kernel_before(OVERLAPS)
        return
    before = tl.load(context_lens + row) - num_tokens
    end = before + tl.minimum(first_token + TOKENS, num_tokens)
    begin = first_key(before + first_token, WINDOW) // KEYS * KEYS
    seen_by_all = (before + first_token + 1) // KEYS * KEYS  # up to the first query's own position
    share = share_of_split(begin, end, num_splits, KEYS)
    begin += split * share
    end = tl.minimum(end, begin + share)
    table = block_tables + row.to(tl.int64) * table_stride
    if OVERLAPS:
        prefetch_keys(
            begin, end, kv_head, table, k_cache, v_cache, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, KEYS, LINES,
            OVERLAPS,
        )  # fmt: skip
    wait_for_kernel_before(OVERLAPS)

    i = tl.arange(0, QUERIES)
    token, head = first_token + i // GROUP, kv_head * GROUP + i % GROUP
    is_query = (i < TOKENS * GROUP) & (token < num_tokens)
    positions = before + token
    d = tl.arange(0, DIM)
    q_at = q + (row_start + token).to(tl.int64)[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :]
    queries = tl.load(q_at, mask=is_query[:, None] & (d < HEAD_DIM)[None, :], other=0.0)

    best = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    if WINDOW == 0:
        seen_by_all = tl.maximum(begin, tl.minimum(end, seen_by_all))
        for key in tl.range(begin, seen_by_all, KEYS, num_stages=STAGES):
            best, total, mixed = add_keys(
                queries, best, total, mixed, key, end, positions, kv_head, table, k_cache, v_cache, scale,
                NUM_KV_HEADS, HEAD_DIM, DIM, VALUE_DIM, WIDTH, BLOCK_SIZE, KEYS, WINDOW, False, True,
            )  # fmt: skip
        begin = seen_by_all
    for key in tl.range(begin, end, KEYS, num_stages=STAGES):
        best, total, mixed = add_keys(
            queries, best, total, mixed, key, end, positions, kv_head, table, k_cache, v_cache, scale,
            NUM_KV_HEADS, HEAD_DIM, DIM, VALUE_DIM, WIDTH, BLOCK_SIZE, KEYS, WINDOW, True, TOKENS > 1,
        )  # fmt: skip

    let_next_begin(OVERLAPS)
    mixed *= v_scale
    if num_splits == 1:
        store_mixed(
            out, sinks, best, total, mixed, row_start + token, head, is_query, NUM_HEADS, VALUE_DIM, WIDTH, HAS_SINKS
        )  # fmt: skip
    else:
        part = (split * num_places + row_start + token - start).to(tl.int64) * NUM_HEADS + head
        w = tl.arange(0, WIDTH)
        is_value = is_query[:, None] & (w < VALUE_DIM)[None, :]
        tl.store(part_mixed + part[:, None] * VALUE_DIM + w[None, :], mixed, mask=is_value)
        tl.store(part_best + part, best, mask=is_query)
        tl.store(part_total + part, total, mask=is_query)
