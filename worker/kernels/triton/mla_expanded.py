"""Attention of a chunk to a piece of its row's context, whose keys and values were expanded from latents.

A head's key is its own part and the rotated one, which all heads share; these are never put together in memory. The
softmax's state goes through memory from piece to piece, so that a context of any length takes the same space.
"""

import triton
import triton.language as tl

from worker.kernels.triton.gqa_attend import LOWEST


@triton.jit
def _add_keys(
    q_nope, q_rope, best, total, mixed, first_key, num_keys, key_limit, expanded, rows, scale, expanded_stride,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """`key_limit`: so many keys of the piece each query sees."""
    key = first_key + tl.arange(0, KEYS)
    of_head = expanded + key.to(tl.int64)[:, None] * expanded_stride
    of_row = rows + key.to(tl.int64)[:, None] * (LATENT + ROPE) + LATENT + tl.arange(0, ROPE)[None, :]
    n, v = tl.arange(0, NOPE)[None, :], tl.arange(0, VALUE)[None, :]
    if IS_MASKED:
        is_key = (key < num_keys)[:, None]
        k_nope = tl.load(of_head + n, mask=is_key, other=0.0)
        k_rope = tl.load(of_row, mask=is_key, other=0.0)
        value = tl.load(of_head + NOPE + v, mask=is_key, other=0.0)
    else:
        k_nope = tl.load(of_head + n)
        k_rope = tl.load(of_row)
        value = tl.load(of_head + NOPE + v)
    scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
    scores = tl.dot(q_nope, tl.trans(k_nope), scores, input_precision="ieee") * scale
    if IS_MASKED:
        scores = tl.where(key[None, :] < key_limit[:, None], scores, -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    return new_best, total, mixed


@triton.jit(do_not_specialize=["start", "num_tokens", "before", "first_key", "num_keys", "is_first", "is_last"])
def attend_expanded_kernel(
    q_nope, q_rope, expanded, rows, out, state_mixed, state_best, state_total, scale, q_stride,
    start, num_tokens, before, first_key, num_keys, is_first, is_last,
    NUM_HEADS: tl.constexpr, HEAD: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    LATENT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program a head and tile of queries: tokens from `start` on, behind `before` others. The piece is of `num_keys`
    keys from `first_key` on: `expanded` [C, H × (N + V)], `rows` [C, L + P]. State: [n, H, V], [n, H] twice."""
    head = tl.program_id(0)
    # The last tiles have the most keys: they go first.
    i = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES + tl.arange(0, QUERIES)
    is_query = i < num_tokens
    token = (start + i).to(tl.int64)
    n, p, v = tl.arange(0, NOPE)[None, :], tl.arange(0, ROPE)[None, :], tl.arange(0, VALUE)[None, :]
    nope = tl.load(q_nope + token[:, None] * q_stride + head * HEAD + n, mask=is_query[:, None], other=0.0)
    rope = tl.load(q_rope + ((token * NUM_HEADS + head) * ROPE)[:, None] + p, mask=is_query[:, None], other=0.0)

    place = i.to(tl.int64) * NUM_HEADS + head
    is_read = is_query & (is_first == 0)
    best = tl.load(state_best + place, mask=is_read, other=LOWEST)
    total = tl.load(state_total + place, mask=is_read, other=0.0)
    mixed = tl.load(state_mixed + place[:, None] * VALUE + v, mask=is_read[:, None], other=0.0)

    key_limit = tl.minimum(num_keys, before + i + 1 - first_key)
    end = tl.maximum(0, tl.max(tl.where(is_query, key_limit, 0), 0))
    seen_by_all = tl.maximum(0, tl.minimum(end, tl.min(key_limit, 0))) // KEYS * KEYS
    of_head = expanded + head * (NOPE + VALUE)
    for at in tl.range(0, seen_by_all, KEYS, num_stages=STAGES):
        best, total, mixed = _add_keys(
            nope, rope, best, total, mixed, at, num_keys, key_limit, of_head, rows, scale,
            NUM_HEADS * (NOPE + VALUE), NOPE, ROPE, VALUE, LATENT, KEYS, False,
        )  # fmt: skip
    for at in tl.range(seen_by_all, end, KEYS, num_stages=STAGES):
        best, total, mixed = _add_keys(
            nope, rope, best, total, mixed, at, num_keys, key_limit, of_head, rows, scale,
            NUM_HEADS * (NOPE + VALUE), NOPE, ROPE, VALUE, LATENT, KEYS, True,
        )  # fmt: skip

    is_kept = is_query & (is_last == 0)
    tl.store(state_best + place, best, mask=is_kept)
    tl.store(state_total + place, total, mask=is_kept)
    tl.store(state_mixed + place[:, None] * VALUE + v, mixed, mask=is_kept[:, None])
    result = mixed / tl.where(total == 0, 1.0, total)[:, None]
    out_at = out + ((token * NUM_HEADS + head) * VALUE)[:, None] + v
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(is_query & (is_last != 0))[:, None])
