"""Attention of a row that is alone and not long: norm, rotation, the cache's write and attention in one kernel.

Such a row is bound by how kernels follow each other. A program is one warp with a head and a few keys, which it holds
before the kernel before has ended: all were there but that of the row's own token, which has a program for itself. What
is left to do then takes some four hundred instructions and no word between warps, and such programs take up so little
of a processor that those of the products behind begin beside them, and read their weights meanwhile.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from worker.kernels.triton.gqa_attend import LOG2_E, LOWEST, first_key
from worker.kernels.triton.machine import WARP_BYTES
from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before

KEYS = 8
"""Of a program."""
PARTS = 64
"""That a row can have: its keys' and its own token's."""
LONGEST = KEYS * (PARTS - 1) + 1
"""Context, the row's own token included."""
WIDEST = 256
"""Elements of a head."""
SLICE = 16
"""Elements of a head that a program puts together."""


@dataclass(frozen=True, slots=True)
class LoneTile:
    beside: int
    """Keys that a warp loads at a time."""
    slice: int

    @classmethod
    def of(cls, dim: int, itemsize: int) -> "LoneTile":
        """`dim`: elements of a head, a power of two."""
        return cls(min(KEYS, max(1, WARP_BYTES // (dim * itemsize))), min(SLICE, dim))


@triton.jit
def _num_parts_of_keys(before, begin, KEYS: tl.constexpr):
    """Of those from `begin` to the row's own token, which stands behind `before` others; −1: a row of padding."""
    return tl.maximum(tl.cdiv(before - begin, KEYS), 0)


@triton.jit
def _norm_weights(weight, d, pair, inside, HAS_NORM: tl.constexpr):
    """(of each element, of the one that it is rotated with)"""
    own, other = 1.0, 1.0
    if HAS_NORM:
        own = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(weight + pair, mask=inside, other=0.0).to(tl.float32)
    return own, other


@triton.jit
def _head(
    at, weights, d, pair, c, s, eps, inside, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr
):  # fmt: skip
    """The head of queries or keys at `at`, normed and rotated, in float32."""
    x = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
    other = x
    if HAS_ROPE:
        other = tl.load(at + pair, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        norm = 1 / tl.sqrt(tl.sum(x * x, 2)[:, :, None] / HEAD_DIM + eps)
        x, other = x * norm * weights[0], other * norm * weights[1]
    if HAS_ROPE:
        x = x * c + other * s
    return x


@triton.jit
def attend_lone_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, token_slots, k_cache, v_cache, part_mixed, part_best, part_total,
    context_lens, block_tables, eps, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HALF_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, BESIDE: tl.constexpr, WINDOW: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program for each `KEYS` keys of earlier steps and each head of queries, and behind these one a head for the
    row's own token, of which it writes key and value to the cache. `scale`: of scores in powers of two. HALF_DIM: i is
    rotated with i + HALF_DIM; what is behind both stands still.

    Tensors are [BESIDE, keys or 1, DIM]: the lanes that load a key have the row's own vectors, too."""
    let_next_begin(OVERLAPS)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    place, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    before = tl.load(context_lens) - 1
    begin = first_key(before, WINDOW) // KEYS * KEYS
    own_place = _num_parts_of_keys(before, begin, KEYS)
    if place > own_place:
        wait_for_kernel_before(OVERLAPS)
        return
    beside, element = tl.arange(0, BESIDE), tl.arange(0, DIM)[None, None, :]
    is_first = beside[:, None, None] == 0
    d = element + beside[:, None, None] * 0
    inside = d < HEAD_DIM
    pair, c, s = d, 1.0, 0.0
    if HAS_ROPE:
        pair = tl.where(d < HALF_DIM, d + HALF_DIM, tl.where(d < 2 * HALF_DIM, d - HALF_DIM, d))
        if HALF_DIM % 8 == 0:
            pair = tl.max_contiguous(tl.multiple_of(pair, [1, 1, 8]), [1, 1, 8])
        angle = tl.load(positions) * (2 * HALF_DIM) + d
        c = tl.load(cos + angle, mask=d < 2 * HALF_DIM, other=1.0).to(tl.float32)
        s = tl.load(sin + angle, mask=d < 2 * HALF_DIM, other=0.0).to(tl.float32)
    q_weights = _norm_weights(q_weight, d, pair, inside, HAS_NORM)
    q_at = qkv + head * HEAD_DIM
    part = place * NUM_HEADS + head
    one = tl.zeros([1, 1, 1], tl.int32)
    if place == own_place:
        k_weights = _norm_weights(k_weight, d, pair, inside, HAS_NORM)
        slot = tl.load(token_slots)
        wait_for_kernel_before(OVERLAPS)
        q = _head(q_at, q_weights, d, pair, c, s, eps, inside, HEAD_DIM, HAS_NORM, HAS_ROPE)
        k_at = qkv + (NUM_HEADS + kv_head) * HEAD_DIM
        k = _head(k_at, k_weights, d, pair, c, s, eps, inside, HEAD_DIM, HAS_NORM, HAS_ROPE)
        k = k.to(k_cache.dtype.element_ty)
        v = tl.load(k_at + NUM_KV_HEADS * HEAD_DIM + d, mask=inside, other=0.0)
        own_at = (((slot // BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + d
        is_written = inside & is_first & (slot >= 0) & (head % GROUP == 0)
        tl.store(k_cache + own_at, k, mask=is_written)
        tl.store(v_cache + own_at, v, mask=is_written)
        score = tl.sum(q * k.to(tl.float32), 2)[:, :, None] * scale
        tl.store(part_mixed + part * HEAD_DIM + d, v.to(tl.float32), mask=inside & is_first)
        tl.store(part_best + part + beside[:, None, None] * 0, score, mask=is_first)
        tl.store(part_total + part + one, one + 1.0)
    else:
        key = begin + place * KEYS + tl.arange(0, KEYS // BESIDE)[None, :] * BESIDE + beside[:, None]
        is_seen = key < before
        if WINDOW > 0:
            is_seen = is_seen & (key > before - WINDOW)
        block = tl.load(block_tables + key // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        entry = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        at = entry[:, :, None] * HEAD_DIM + element
        is_seen = is_seen[:, :, None]
        keys = tl.load(k_cache + at, mask=is_seen & (element < HEAD_DIM), other=0.0).to(tl.float32)
        values = tl.load(v_cache + at, mask=is_seen & (element < HEAD_DIM), other=0.0).to(tl.float32)
        wait_for_kernel_before(OVERLAPS)
        q = _head(q_at, q_weights, d, pair, c, s, eps, inside, HEAD_DIM, HAS_NORM, HAS_ROPE)
        scores = tl.sum(keys * q, 2)[:, :, None] * scale
        scores = tl.where(is_seen, scores, LOWEST)
        best = tl.max(tl.max(scores, 1), 0)[None, :, None]
        weights = tl.where(is_seen, tl.exp2(scores - best), 0.0)
        mixed = tl.sum(tl.sum(weights * values, 1), 0)[None, None, :]
        tl.store(part_mixed + part * HEAD_DIM + element, mixed, mask=element < HEAD_DIM)
        tl.store(part_best + part + one, best)
        tl.store(part_total + part + one, tl.sum(tl.sum(weights, 1), 0)[None, :, None])


@triton.jit
def sum_lone_kernel(
    sinks, out, part_mixed, part_best, part_total, context_lens,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SLICE: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a head and `SLICE` of its elements: what `attend_lone_kernel` left, together."""
    let_next_begin(OVERLAPS)
    head = tl.program_id(0)
    before = tl.load(context_lens) - 1
    begin = first_key(before, WINDOW) // KEYS * KEYS
    num_parts = _num_parts_of_keys(before, begin, KEYS) + 1
    wait_for_kernel_before(OVERLAPS)
    place = tl.arange(0, PARTS)
    d = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    part = place * NUM_HEADS + head
    bests = tl.load(part_best + part, mask=place < num_parts, other=LOWEST)
    totals = tl.load(part_total + part, mask=place < num_parts, other=0.0)
    is_element = (place < num_parts)[:, None] & (d < HEAD_DIM)[None, :]
    mixed = tl.load(part_mixed + part[:, None] * HEAD_DIM + d[None, :], mask=is_element, other=0.0)
    best = tl.max(bests, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        best = tl.maximum(best, sink)
    weights = tl.exp2(bests - best)
    total = tl.sum(totals * weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - best)
    result = tl.sum(mixed * weights[:, None], 0) / total
    tl.store(out + head * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
