"""Norm and rotation of queries and keys, and the write of keys and values to the cache, in one kernel."""

import triton
import triton.language as tl

from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before

HEADS = 8
"""Heads of a token that a program takes."""

FP8_MOST = tl.constexpr(448.0)


@triton.jit
def _to_fp8(x, scale):
    """As torch's `to_fp8`: beyond the range its end, NaN for what is not finite."""
    scaled = x.to(tl.float32) / scale
    return (tl.minimum(tl.maximum(scaled, -FP8_MOST), FP8_MOST) + scaled * 0).to(tl.float8e4nv)


@triton.jit
def _weights(q_weight, k_weight, d, is_query, is_key):
    """Of the norm of each head, [HEADS, elements]."""
    weight = tl.load(q_weight + d, mask=is_query, other=0.0) + tl.load(k_weight + d, mask=is_key, other=0.0)
    return weight.to(tl.float32)


@triton.jit
def _put(
    x, d, inside, own, apart, entry, is_query, is_value, in_cache, k_cache, v_cache, scale,
    IS_CHANGED: tl.constexpr, IS_FP8: tl.constexpr, IS_APART: tl.constexpr,
):  # fmt: skip
    """Elements `d` of the heads: to where the caller finds them, and of keys and values to the cache."""
    cached = x
    if IS_FP8:
        cached = _to_fp8(x, scale)
        x = tl.where(is_query, x, (cached.to(tl.float32) * scale).to(x.dtype))
    if IS_APART:
        tl.store(apart + d, x, mask=inside)
    elif IS_CHANGED:
        tl.store(own + d, x, mask=inside & (IS_FP8 | ~is_value))
    in_cache = inside & in_cache & ~is_query
    tl.store(k_cache + entry + d, cached.to(k_cache.dtype.element_ty), mask=in_cache & ~is_value)
    tl.store(v_cache + entry + d, cached.to(v_cache.dtype.element_ty), mask=in_cache & is_value)


@triton.jit
def write_qkv_kernel(
    qkv, q_out, k_out, v_out, q_weight, k_weight, cos, sin, positions, token_slots, k_cache, v_cache, k_scale, v_scale,
    eps, qkv_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HALF_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, IS_FP8: tl.constexpr, IS_APART: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program for `HEADS` heads of a token, q, k and v side by side; q and k change in place, or, IS_APART, all three
    go to tensors of their own, [T, heads × D].

    Rotation pairs i with i + HALF_DIM, so that a head is two halves of `HALF` elements, the last of them past HALF_DIM,
    and `REST` that stand still, the last of them past the head.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    key_head, value_head = head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS
    is_query, is_value, is_head = key_head < 0, value_head >= 0, value_head < NUM_KV_HEADS
    dim = tl.where(is_value, VALUE_DIM, HEAD_DIM)
    i = tl.arange(0, HALF)[None, :]
    j = HALF_DIM + i
    in_first, in_second = is_head & (i < HALF_DIM) & (i < dim), is_head & (i < HALF_DIM) & (j < dim)
    let_next_begin(OVERLAPS)
    slot = tl.load(token_slots + token)
    if HAS_NORM:
        is_key = ~is_query & ~is_value
        weight = _weights(q_weight, k_weight, i, in_first & is_query, in_first & is_key)
        second_weight = _weights(q_weight, k_weight, j, in_second & is_query, in_second & is_key)
    if HAS_ROPE:
        at = tl.load(positions + token) * (2 * HALF_DIM) + i
        c = tl.load(cos + at, mask=i < HALF_DIM, other=0.0).to(tl.float32)
        s = tl.load(sin + at + HALF_DIM, mask=i < HALF_DIM, other=0.0).to(tl.float32)
    wait_for_kernel_before(OVERLAPS)
    dtype = qkv.dtype.element_ty
    of_values = (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + value_head * VALUE_DIM
    own = qkv + token * qkv_stride + tl.where(is_value, of_values, head * HEAD_DIM)
    first = tl.load(own + i, mask=in_first, other=0.0).to(tl.float32)
    second = tl.load(own + j, mask=in_second, other=0.0).to(tl.float32)
    if REST > 0:
        r = 2 * HALF_DIM + tl.arange(0, REST)[None, :]
        in_rest = is_head & (r < dim)
        rest = tl.load(own + r, mask=in_rest, other=0.0).to(tl.float32)

    new_first, new_second = first, second
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        norm = (1 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        new_first, new_second = first * norm * weight, second * norm * second_weight
        if REST > 0:
            rest_weight = _weights(q_weight, k_weight, r, in_rest & is_query, in_rest & is_key)
            rest = tl.where(is_value, rest, rest * norm * rest_weight)
    if HAS_ROPE:
        rotated = new_first * c - new_second * s
        new_second = new_second * c + new_first * s
        new_first = rotated
    first = tl.where(is_value, first, new_first).to(dtype)
    second = tl.where(is_value, second, new_second).to(dtype)

    apart = q_out + (token * NUM_HEADS + head) * HEAD_DIM
    if IS_APART:
        apart = tl.where(is_query, apart, k_out + (token * NUM_KV_HEADS + key_head) * HEAD_DIM)
        apart = tl.where(is_value, v_out + (token * NUM_KV_HEADS + value_head) * VALUE_DIM, apart)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    kv_head = tl.where(is_value, value_head, key_head)
    entry = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset) * dim
    scale = tl.where(is_value, v_scale, k_scale)
    _put(
        first, i, in_first, own, apart, entry, is_query, is_value, slot >= 0, k_cache, v_cache, scale,
        HAS_NORM or HAS_ROPE or IS_FP8, IS_FP8, IS_APART,
    )  # fmt: skip
    _put(
        second, j, in_second, own, apart, entry, is_query, is_value, slot >= 0, k_cache, v_cache, scale,
        HAS_NORM or HAS_ROPE or IS_FP8, IS_FP8, IS_APART,
    )  # fmt: skip
    if REST > 0:
        _put(
            rest.to(dtype), r, in_rest, own, apart, entry, is_query, is_value, slot >= 0, k_cache, v_cache, scale,
            HAS_NORM or IS_FP8, IS_FP8, IS_APART,
        )  # fmt: skip
