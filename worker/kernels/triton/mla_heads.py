"""Products of a few tokens with a matrix for each head, on either side of absorbed latent attention.

A program holds its part of a head's matrix before it waits for the kernel before, and has one product to do then. Of
more tokens cuBLAS does it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.launch import Launches
from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before

MAX_PAIRS = 1024
"""Of a head and a token."""
TOKENS = 16
"""Of a program."""
HELD = 16384
"""Elements of a matrix that a program holds."""


@triton.jit(do_not_specialize=["num_tokens"])
def _heads_kernel(
    x, weight, out, num_tokens, x_token, x_head, weight_head, weight_in, weight_out, out_token, out_head,
    INPUTS: tl.constexpr, PIECE: tl.constexpr, TOKENS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """`PIECE` of the outputs of a head and `TOKENS` tokens. What is named after a tensor and one of its dimensions is a
    stride; x and out are contiguous in a head."""
    head = tl.program_id(0).to(tl.int64)
    k, n = tl.arange(0, INPUTS), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    token = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS))[:, None]
    is_token = token < num_tokens
    w = tl.load(weight + head * weight_head + k[:, None] * weight_in + n[None, :] * weight_out)
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    values = tl.load(x + head * x_head + token.to(tl.int64) * x_token + k[None, :], mask=is_token, other=0.0)
    result = tl.dot(values, w, input_precision="ieee")
    out_at = out + head * out_head + token.to(tl.int64) * out_token + n[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_token)


def product_by_head(x: Tensor, weight: Tensor, out: Tensor, launches: Launches, *, overlaps: bool) -> None:
    """out[t, h] = x[t, h] @ weight[h]: x [T, H, I] and out [T, H, O] with any strides but the last, weight [H, I, O]
    with any; I and O are powers of two, at least 16."""
    num_tokens, num_heads, num_inputs = x.shape
    num_outputs = out.shape[2]
    if num_tokens * num_heads > MAX_PAIRS:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return
    piece = min(num_outputs, max(16, HELD // num_inputs))
    launches(
        _heads_kernel, (num_heads, num_outputs // piece, triton.cdiv(num_tokens, TOKENS)),
        x, weight, out, num_tokens, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1),
        num_inputs, piece, TOKENS, overlaps, num_warps=4, **launch_options(overlaps),
    )  # fmt: skip
