"""Attention of uniform rows over the paged cache: each has as many tokens as all others, most of them one.

Such rows are bound by reading the cache, and by how kernels follow each other. Where several programs split a row's
keys, whichever ends last puts their parts together. (That takes as long as a kernel takes to follow another one when a
row is alone: its many parts are left to `reduce_kernel`, which has more programs.)
"""

import triton
import triton.language as tl

from worker.kernels.triton.gqa_attend import (
    LOWEST,
    add_keys,
    first_key,
    prefetch_keys,
    row_and_split,
    share_of_split,
    store_mixed,
)
from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before


@triton.jit
def _sum_of_parts(
    part_mixed, part_best, part_total, row, kv_head, num_parts, num_rows, usual_splits, first_extra,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, HAS_EXTRA: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of the softmax and values mixed of a row's queries, [QUERIES] and [QUERIES, WIDTH]: its parts in
    the order of the keys, `PARTS` at a time. They are read past the L1 cache: other processors have written them."""
    i, w = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    token, head = i // GROUP, kv_head * GROUP + i % GROUP
    best = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, num_parts, PARTS):
        split = start + tl.arange(0, PARTS)
        program = split * num_rows + row
        if HAS_EXTRA:
            of_extra = usual_splits * num_rows + tl.load(first_extra + row) + split - usual_splits
            program = tl.where(split < usual_splits, program, of_extra)
        part = (program[None, :] * TOKENS + token[:, None]).to(tl.int64) * NUM_HEADS + head[:, None]
        is_part = (i < TOKENS * GROUP)[:, None] & (split < num_parts)[None, :]
        bests = tl.load(part_best + part, mask=is_part, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(part_total + part, mask=is_part, other=0.0, cache_modifier=".cg")
        mixed_at = part_mixed + part[:, :, None] * VALUE_DIM + w[None, None, :]
        is_element = is_part[:, :, None] & (w < VALUE_DIM)[None, None, :]
        values = tl.load(mixed_at, mask=is_element, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, tl.max(bests, 1))
        shrink, weights = tl.exp2(best - new_best), tl.exp2(bests - new_best[:, None])
        total = total * shrink + tl.sum(totals * weights, 1)
        mixed = mixed * shrink[:, None] + tl.sum(values * weights[:, :, None], 1)
        best = new_best
    return best, total, mixed


@triton.jit(
    do_not_specialize=["num_rows", "usual_splits"],
    do_not_specialize_on_alignment=["part_best", "part_total", "arrived", "splits_by_row", "first_extra", "extra_rows"],
)
def attend_rows_kernel(
    q, k_cache, v_cache, sinks, out, part_mixed, part_best, part_total, arrived, context_lens, block_tables,
    splits_by_row, first_extra, extra_rows, scale, v_scale, q_stride, table_stride, num_rows, usual_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    FEWEST: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, IS_SPLIT: tl.constexpr,
    HAS_EXTRA: tl.constexpr, LINES: tl.constexpr, IS_EARLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a row, head of keys and split of the keys; the first dimension of the grid is as in `row_and_split`.

    FEWEST: a power of two that holds a row's queries, which do not fill `QUERIES`, at least a tensor core's. IS_SPLIT:
    a row may have several parts. PARTS: that are added up at a time; 0: they are left where they are. `arrived`: int32
    [rows, heads of keys], 0 before and after. LINES: of memory that a key takes. IS_EARLY: the next kernel may begin at
    once.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    program, kv_head = tl.program_id(0), tl.program_id(1)
    row, split, num_splits = row_and_split(
        program, num_rows, usual_splits, splits_by_row, first_extra, extra_rows, HAS_EXTRA
    )  # fmt: skip
    if row < 0:
        wait_for_kernel_before(OVERLAPS)
        return
    before = tl.load(context_lens + row) - TOKENS  # negative: a row of padding
    end = before + TOKENS
    begin = first_key(before, WINDOW) // KEYS * KEYS
    share = share_of_split(begin, end, num_splits, KEYS)
    num_parts = tl.maximum(tl.cdiv(end - begin, share), 1)
    begin += split * share
    end = tl.minimum(end, begin + share)
    let_next_begin(OVERLAPS and IS_EARLY)
    if split >= num_parts:
        wait_for_kernel_before(OVERLAPS)
        return
    table = block_tables + row.to(tl.int64) * table_stride
    if OVERLAPS:
        prefetch_keys(
            begin, end, kv_head, table, k_cache, v_cache, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, KEYS, LINES,
            OVERLAPS,
        )  # fmt: skip
    wait_for_kernel_before(OVERLAPS)

    i, d, w = tl.arange(0, QUERIES), tl.arange(0, DIM), tl.arange(0, WIDTH)
    token, head = i // GROUP, kv_head * GROUP + i % GROUP
    is_query = i < TOKENS * GROUP
    q_at = q + (row * TOKENS + token).to(tl.int64)[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :]
    queries = tl.load(q_at, mask=is_query[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    best = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for key in tl.range(begin, end, KEYS, num_stages=STAGES):
        best, total, mixed = add_keys(
            queries, best, total, mixed, key, end, before + token, kv_head, table, k_cache, v_cache, scale,
            NUM_KV_HEADS, HEAD_DIM, DIM, VALUE_DIM, WIDTH, BLOCK_SIZE, KEYS, WINDOW, True, TOKENS > 1,
        )  # fmt: skip
    let_next_begin(OVERLAPS and not IS_EARLY)
    mixed *= v_scale
    if not IS_SPLIT or (PARTS > 0 and num_parts == 1):
        store_mixed(
            out, sinks, best, total, mixed, row * TOKENS + token, head, is_query,
            NUM_HEADS, VALUE_DIM, WIDTH, HAS_SINKS,
        )  # fmt: skip
    else:
        part = (program * TOKENS + token).to(tl.int64) * NUM_HEADS + head
        is_value = is_query[:, None] & (w < VALUE_DIM)[None, :]
        tl.store(part_mixed + part[:, None] * VALUE_DIM + w[None, :], mixed, mask=is_value)
        tl.store(part_best + part, best, mask=is_query)
        tl.store(part_total + part, total, mask=is_query)
        if PARTS > 0:
            # A program marks its arrival after all of its stores, and the last one reads after all marks.
            tl.debug_barrier()
            mark = arrived + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(mark, 1, sem="acq_rel") == num_parts - 1:
                tl.store(mark, 0)
                all_best, all_total, all_mixed = _sum_of_parts(
                    part_mixed, part_best, part_total, row, kv_head, num_parts, num_rows, usual_splits, first_extra,
                    NUM_HEADS, GROUP, TOKENS, FEWEST, VALUE_DIM, WIDTH, PARTS, HAS_EXTRA,
                )  # fmt: skip
                j = tl.arange(0, FEWEST)
                store_mixed(
                    out, sinks, all_best, all_total, all_mixed, row * TOKENS + j // GROUP, kv_head * GROUP + j % GROUP,
                    j < TOKENS * GROUP, NUM_HEADS, VALUE_DIM, WIDTH, HAS_SINKS,
                )  # fmt: skip
