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
def write_qkv_kernel(
    qkv, q_out, k_out, v_out, q_weight, k_weight, cos, sin, positions, token_slots, k_cache, v_cache, k_scale, v_scale,
    eps, qkv_stride, block_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
    IS_FP8: tl.constexpr, IS_APART: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program for `HEADS` heads of a token, q, k and v side by side; q and k change in place, or, IS_APART, all three
    go to tensors of their own, [T, heads × D].

    Rotation pairs i with i + D/2, so that a head is two halves of `HALF` elements, the last of them past D/2.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (i < half)
    let_next_begin(OVERLAPS)
    slot = tl.load(token_slots + token)
    if HAS_NORM:
        is_query, is_key = inside & (head < NUM_HEADS), inside & (head >= NUM_HEADS) & ~is_value
        weight = tl.load(q_weight + i, mask=is_query, other=0.0) + tl.load(k_weight + i, mask=is_key, other=0.0)
        second_weight = tl.load(q_weight + half + i, mask=is_query, other=0.0)
        second_weight += tl.load(k_weight + half + i, mask=is_key, other=0.0)
    if HAS_ROPE:
        position = tl.load(positions + token)
        c = tl.load(cos + position * HEAD_DIM + i, mask=i < half, other=0.0).to(tl.float32)
        s = tl.load(sin + position * HEAD_DIM + half + i, mask=i < half, other=0.0).to(tl.float32)
    wait_for_kernel_before(OVERLAPS)
    at = qkv + token * qkv_stride + head * HEAD_DIM + i
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)

    new_first, new_second = first, second
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = (1 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        new_first = first * scale * weight.to(tl.float32)
        new_second = second * scale * second_weight.to(tl.float32)
    if HAS_ROPE:
        rotated = new_first * c - new_second * s
        new_second = new_second * c + new_first * s
        new_first = rotated
    first = tl.where(is_value, first, new_first).to(qkv.dtype.element_ty)
    second = tl.where(is_value, second, new_second).to(qkv.dtype.element_ty)
    cached_first, cached_second = first, second
    if IS_FP8:
        scale = tl.where(is_value, v_scale, k_scale)
        cached_first, cached_second = _to_fp8(first, scale), _to_fp8(second, scale)
        is_cached = head >= NUM_HEADS
        first = tl.where(is_cached, cached_first.to(tl.float32) * scale, first).to(qkv.dtype.element_ty)
        second = tl.where(is_cached, cached_second.to(tl.float32) * scale, second).to(qkv.dtype.element_ty)
    key_head, value_head = head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS
    if IS_APART:
        of_query = head < NUM_HEADS
        to = q_out + (token * NUM_HEADS + head) * HEAD_DIM + i
        tl.store(to, first, mask=inside & of_query)
        tl.store(to + half, second, mask=inside & of_query)
        to = k_out + (token * NUM_KV_HEADS + key_head) * HEAD_DIM + i
        tl.store(to, first, mask=inside & ~of_query & ~is_value)
        tl.store(to + half, second, mask=inside & ~of_query & ~is_value)
        to = v_out + (token * NUM_KV_HEADS + value_head) * HEAD_DIM + i
        tl.store(to, first, mask=inside & is_value)
        tl.store(to + half, second, mask=inside & is_value)
    elif HAS_NORM or HAS_ROPE or IS_FP8:
        is_changed = inside & (IS_FP8 | ~is_value)
        tl.store(at, first, mask=is_changed)
        tl.store(at + half, second, mask=is_changed)

    in_cache = inside & (slot >= 0)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    places = block * block_stride + (key_head * BLOCK_SIZE + offset) * HEAD_DIM + i
    is_written = in_cache & (key_head >= 0) & ~is_value
    tl.store(k_cache + places, cached_first.to(k_cache.dtype.element_ty), mask=is_written)
    tl.store(k_cache + places + half, cached_second.to(k_cache.dtype.element_ty), mask=is_written)
    places = block * block_stride + (value_head * BLOCK_SIZE + offset) * HEAD_DIM + i
    is_written = in_cache & is_value
    tl.store(v_cache + places, cached_first.to(v_cache.dtype.element_ty), mask=is_written)
    tl.store(v_cache + places + half, cached_second.to(v_cache.dtype.element_ty), mask=is_written)
