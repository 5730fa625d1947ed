"""Rotation of queries; norm and rotation of a token's row, and its write to the cache; in one kernel."""

import triton
import triton.language as tl

from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before


@triton.jit
def write_kernel(
    x, q_rope, norm_weight, cos, sin, positions, token_slots, cache, eps, x_stride,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, NOPE: tl.constexpr, HEADS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program for `HEADS` heads of a token's query; the first of them for its row, too. Rotated queries go to
    `q_rope` [T, H, P]."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = ROPE // 2
    HEAD: tl.constexpr = NOPE + ROPE
    i = tl.arange(0, half)
    step: tl.constexpr = 2 if IS_INTERLEAVED else 1
    apart: tl.constexpr = 1 if IS_INTERLEAVED else half
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    position = tl.load(positions + token)
    c = tl.load(cos + position * ROPE + i).to(tl.float32)
    s = tl.load(sin + position * ROPE + half + i).to(tl.float32)

    head = group * HEADS + tl.arange(0, HEADS)[:, None]
    inside = (head < NUM_HEADS) & (i[None, :] < half)
    at = x + token * x_stride + head * HEAD + NOPE + i[None, :] * step
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + apart, mask=inside, other=0.0).to(tl.float32)
    to = q_rope + (token * NUM_HEADS + head) * ROPE + i[None, :]
    tl.store(to, (first * c[None, :] - second * s[None, :]).to(x.dtype.element_ty), mask=inside)
    tl.store(to + half, (second * c[None, :] + first * s[None, :]).to(x.dtype.element_ty), mask=inside)

    slot = tl.load(token_slots + token)
    if (group == 0) & (slot >= 0):
        row = x + token * x_stride + NUM_HEADS * HEAD
        place = cache + slot * (LATENT + ROPE)
        n = tl.arange(0, LATENT)
        latent = tl.load(row + n).to(tl.float32)
        latent *= 1 / tl.sqrt(tl.sum(latent * latent, 0) / LATENT + eps)
        latent *= tl.load(norm_weight + n).to(tl.float32)
        tl.store(place + n, latent.to(cache.dtype.element_ty))
        k_first = tl.load(row + LATENT + i * step).to(tl.float32)
        k_second = tl.load(row + LATENT + i * step + apart).to(tl.float32)
        tl.store(place + LATENT + i, (k_first * c - k_second * s).to(cache.dtype.element_ty))
        tl.store(place + LATENT + half + i, (k_second * c + k_first * s).to(cache.dtype.element_ty))
