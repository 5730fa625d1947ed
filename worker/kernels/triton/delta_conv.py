"""The causal convolution of gated DeltaNet over each row's tokens and the last ones before them."""

import triton
import triton.language as tl

from worker.kernels.triton.gqa_attend import row_of_tile
from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def convolve_kernel(
    x, taps, inputs, out, groups, query_starts, positions, x_stride, first_row, num_rows,
    NUM_CHANNELS: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr, KEPT_TILE: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr, IS_SINGLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a tile of a row's tokens, and of channels; IS_SINGLE: all rows have one token.

    The first tile of a row, which alone sees tokens of earlier steps, leaves the last `KEPT` for later ones, with
    padding `KEPT_TILE`.
    """
    let_next_begin(OVERLAPS)
    if IS_SINGLE:
        row, tile, length = tl.program_id(0), 0, 1
        start = row
    else:
        row, tile = row_of_tile(tl.program_id(0), query_starts, first_row, num_rows, TOKENS)
        start = tl.load(query_starts + row)
        length = tl.load(query_starts + row + 1) - start
        if tile * TOKENS >= length:
            return
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    is_channel = channel < NUM_CHANNELS
    state = inputs + tl.load(groups + row) * (KEPT * NUM_CHANNELS) + channel
    position = tl.load(positions + start)
    x_row = x + start.to(tl.int64) * x_stride + channel
    token = (tile * TOKENS + tl.arange(0, TOKENS))[:, None]
    is_element = (token < length) & is_channel
    wait_for_kernel_before(OVERLAPS)
    mixed = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for i in tl.static_range(WIDTH):
        at = token - (WIDTH - 1) + i
        new = tl.load(x_row + at.to(tl.int64) * x_stride, mask=is_element & (at >= 0), other=0.0)
        is_old = is_element & (at < 0) & (position + at >= 0)
        old = tl.load(state + (position + at) % KEPT * NUM_CHANNELS, mask=is_old, other=0.0)
        mixed += (new + old).to(tl.float32) * tl.load(taps + channel * WIDTH + i, mask=is_channel, other=0.0)
    mixed = mixed / (1 + tl.exp(-mixed))
    out_at = out + (start + token).to(tl.int64) * NUM_CHANNELS + channel
    tl.store(out_at, mixed.to(out.dtype.element_ty), mask=is_element)
    if tile == 0:
        kept = tl.maximum(length - KEPT, 0) + tl.arange(0, KEPT_TILE)[:, None]
        is_kept = (kept < length) & is_channel
        newest = tl.load(x_row + kept.to(tl.int64) * x_stride, mask=is_kept, other=0.0)
        tl.debug_barrier()  # other threads may still read what is written here
        tl.store(state + (position + kept) % KEPT * NUM_CHANNELS, newest, mask=is_kept)
