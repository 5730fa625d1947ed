"""The sum over ranks, the residual and the norm behind it in one kernel. All add up in the order of the ranks, so that
all get the same bits.

Of the few rows of a decode step each rank sends its part of a row to all others (`messages`), unless the product that
it is of has done that as it computed it, and waits for theirs. Of more rows it reads their parts where they are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.messages import addresses_of, ask, complete, floats_of, send, wait_for_word, words_of
from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before
from worker.parallel.symmetric import Inboxes, Parts


@triton.jit
def _sum_norm_kernel(
    x, inboxes, turns, residual, weight, out, eps, row_stride, dtype: tl.constexpr, IS_HALF: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, IS_SENT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a row; tensors are given as int32 words. `row_stride`: words that an inbox has for a message.

    IS_SENT: the product has sent what x would be, to this rank, too. It lets this kernel begin once those before it are
    done, and messages are all that is waited for: when they are here, the product has read all that it reads, and what
    it sends needs nobody on this rank. Its stores take two microseconds to be confirmed by the other ranks. What the
    kernels before it left is read past the L1 cache, which nobody has emptied since.
    """
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    let_next_begin(OVERLAPS)
    if not IS_SENT:
        wait_for_kernel_before(OVERLAPS)
    turn = tl.load(turns + row, cache_modifier=".cg")
    addresses = addresses_of(inboxes, SIZE)
    ours = addresses[RANK] + (row * 2 + turn) * SIZE * row_stride
    w_low, w_high = floats_of(tl.load(weight + word, mask=inside, other=0), dtype, IS_HALF)
    stream = tl.load(residual + row * WORDS + word, mask=inside, other=0, cache_modifier=".cg")
    low, high = floats_of(stream, dtype, IS_HALF)
    if IS_SENT:
        wait_for_word(ours + RANK * row_stride)
    else:
        mine = tl.load(x + row * WORDS + word, mask=inside, other=0)
        send(mine, row, word, inside, turn, addresses, row_stride, RANK, SIZE, False)
    found = ()
    for rank in tl.static_range(SIZE):
        if IS_SENT or rank != RANK:
            found += (ask(ours + rank * row_stride, word, inside),)  # type: ignore[assignment]
        else:
            found += (mine,)  # type: ignore[assignment]
    for rank in tl.static_range(SIZE):
        part = found[rank]  # type: ignore[var-annotated]
        if IS_SENT or rank != RANK:
            part = complete(part, ours + rank * row_stride, word, inside)
        part_low, part_high = floats_of(part, dtype, IS_HALF)
        low += part_low
        high += part_high
    tl.store(turns + row, 1 - turn)
    total = words_of(low, high, dtype, IS_HALF)
    tl.store(residual + row * WORDS + word, total, mask=inside)
    low, high = floats_of(total, dtype, IS_HALF)
    mean = tl.sum(low * low + high * high) / (2 * WORDS)
    scale = 1 / tl.sqrt(mean + eps)
    scaled = words_of(low * scale * w_low, high * scale * w_high, dtype, IS_HALF)
    tl.store(out + row * WORDS + word, scaled, mask=inside)


def sum_and_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, inboxes: Inboxes, *, overlaps: bool, num_warps: int
) -> Tensor:
    """residual [R, N] += the sum of all ranks' x [R, N], in place; returns its norm, in place of x. The inboxes must
    have room (`Inboxes.hold`). Receives what was sent of x (`Inboxes.take`), or sends it."""
    num_words = x.shape[1] * x.element_size() // 4
    x_words, residual_words, weight_words = (tensor.view(torch.int32) for tensor in (x, residual, weight))
    _sum_norm_kernel[(len(x),)](
        x_words, inboxes.addresses, inboxes.turns, residual_words, weight_words, x_words, eps, inboxes.num_words,
        _TRITON_DTYPES[x.dtype], x.element_size() == 2, num_words, triton.next_power_of_2(num_words), inboxes.rank,
        len(inboxes.addresses), inboxes.take(x), overlaps, num_warps=num_warps, **launch_options(overlaps),
    )  # fmt: skip
    return x


@triton.jit(do_not_specialize=["offset"])
def _norm_of_parts_kernel(
    addresses, offset, residual, weight, out, eps, N: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr
):
    """A program a row. `offset`: bytes."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = row * N + column
    parts = ()
    for rank in tl.static_range(SIZE):
        address = tl.load(addresses + rank) + offset
        part = tl.multiple_of(address.to(tl.pointer_type(residual.dtype.element_ty)), 16)
        parts += (tl.load(part + at, mask=inside, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
    scales = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(SIZE):
        total += parts[rank].to(tl.float32)
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside)
    total = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(total * total) / N + eps)
    tl.store(out + at, (total * scale * scales).to(out.dtype.element_ty), mask=inside)


def norm_of_parts(parts: Parts, residual: Tensor, weight: Tensor, eps: float, *, num_warps: int) -> Tensor:
    """residual [R, N] += the sum of all parts, in place; returns its norm, which is new."""
    num_rows, width = residual.shape
    out = torch.empty_like(residual)
    _norm_of_parts_kernel[(num_rows,)](
        parts.addresses, parts.offset, residual, weight, out, eps, width, triton.next_power_of_2(width),
        len(parts.addresses), num_warps=num_warps,
    )  # fmt: skip
    return out


_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
