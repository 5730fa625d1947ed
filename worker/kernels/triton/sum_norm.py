"""The sum over ranks, the residual and the norm behind it in one kernel, for the few rows of a decode step.

Each rank sends its part of a row to all others and waits for theirs; nobody asks, and no fence is needed, since a flag
travels with each word of the data (the LL protocol of NVIDIA's NCCL). All add up in the order of the ranks, so that all
get the same bits.

Two messages of a row can be under way: who sends the second next one has received the next, which its sender sent after
all of its programs had read the one before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before
from worker.parallel.symmetric import Inboxes


@triton.jit
def _floats(words, dtype: tl.constexpr, IS_HALF: tl.constexpr):
    """What is in 32 bits: one float32, twice, or two half ones."""
    if IS_HALF:
        low = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        return low, high
    one = words.to(tl.float32, bitcast=True)
    return one, one


@triton.jit
def _words(low, high, dtype: tl.constexpr, IS_HALF: tl.constexpr):
    if IS_HALF:
        low_bits = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        high_bits = high.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        return (low_bits | (high_bits << 16)).to(tl.int32, bitcast=True)
    return low.to(tl.int32, bitcast=True)


@triton.jit
def _receive(inbox, word, inside, epoch):
    """Waits for words that carry this epoch."""
    wanted = epoch.to(tl.int64) << 32
    message = tl.load(inbox + word, mask=inside, other=wanted, volatile=True)
    while tl.sum(((message >> 32) != epoch).to(tl.int32)) > 0:
        message = tl.load(inbox + word, mask=inside, other=wanted, volatile=True)
    return message.to(tl.int32)


@triton.jit
def _sum_norm_kernel(
    x, inboxes, epochs, residual, weight, out, eps, row_stride, dtype: tl.constexpr, IS_HALF: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a row; tensors are given as int32 words. `row_stride`: words that an inbox has for a message."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    epoch = tl.load(epochs + row) + 1
    mine = tl.load(x + row * WORDS + word, mask=inside, other=0)
    message = mine.to(tl.uint32, bitcast=True).to(tl.int64) | (epoch.to(tl.int64) << 32)
    places = (row * 2 + epoch % 2) * SIZE
    for other in tl.static_range(SIZE):
        if other != RANK:
            theirs = tl.load(inboxes + other).to(tl.pointer_type(tl.int64)) + (places + RANK) * row_stride
            tl.store(theirs + word, message, mask=inside, cache_modifier=".wt")
    ours = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64))
    low, high = _floats(tl.load(residual + row * WORDS + word, mask=inside, other=0), dtype, IS_HALF)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            part = mine
        else:
            part = _receive(ours + (places + rank) * row_stride, word, inside, epoch)
        part_low, part_high = _floats(part, dtype, IS_HALF)
        low += part_low
        high += part_high
    tl.store(epochs + row, epoch)
    total = _words(low, high, dtype, IS_HALF)
    tl.store(residual + row * WORDS + word, total, mask=inside)
    low, high = _floats(total, dtype, IS_HALF)
    mean = tl.sum(low * low + high * high) / (2 * WORDS)
    scale = 1 / tl.sqrt(mean + eps)
    w_low, w_high = _floats(tl.load(weight + word, mask=inside, other=0), dtype, IS_HALF)
    scaled = _words(low * scale * w_low, high * scale * w_high, dtype, IS_HALF)
    tl.store(out + row * WORDS + word, scaled, mask=inside)


def sum_and_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, inboxes: Inboxes, *, overlaps: bool, num_warps: int
) -> Tensor:
    """residual [R, N] += the sum of all ranks' x [R, N], in place; returns its norm, in place of x. The inboxes must
    have room (`Inboxes.hold`)."""
    num_words = x.shape[1] * x.element_size() // 4
    x_words, residual_words, weight_words = (tensor.view(torch.int32) for tensor in (x, residual, weight))
    _sum_norm_kernel[(len(x),)](
        x_words, inboxes.addresses, inboxes.epochs, residual_words, weight_words, x_words, eps, inboxes.num_words,
        _TRITON_DTYPES[x.dtype], x.element_size() == 2, num_words, triton.next_power_of_2(num_words), inboxes.rank,
        len(inboxes.addresses), overlaps, num_warps=num_warps, **launch_options(overlaps),
    )  # fmt: skip
    return x


_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
