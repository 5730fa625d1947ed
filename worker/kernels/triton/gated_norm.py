"""The norm of each head, times a gate."""

import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.delta import GatedNormKernel
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before

ROWS = 4
"""Heads that a program takes."""


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x, gate, weight, out, eps, gate_stride, num_rows,
    NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < SIZE)
    let_next_begin(OVERLAPS)
    scales = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait_for_kernel_before(OVERLAPS)
    values = tl.load(x + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    gate_at = gate + row // NUM_HEADS * gate_stride + row % NUM_HEADS * SIZE + column
    gates = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, 1) / SIZE + eps)
    normed = (values * scale[:, None]).to(out.dtype.element_ty).to(tl.float32) * scales
    gated = normed.to(out.dtype.element_ty).to(tl.float32) * gates / (1 + tl.exp(-gates))
    tl.store(out + row * SIZE + column, gated.to(out.dtype.element_ty), mask=inside)


class TritonGatedNorm(GatedNormKernel):
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_tokens, num_heads, size = x.shape
        out = x.new_empty(num_tokens, num_heads * size)
        overlaps = self._machine.overlaps(num_tokens)
        _gated_norm_kernel[(triton.cdiv(num_tokens * num_heads, ROWS),)](
            x, gate, weight, out, eps, gate.stride(0), num_tokens * num_heads, num_heads, size,
            triton.next_power_of_2(size), ROWS, overlaps, num_warps=4, **launch_options(overlaps),
        )  # fmt: skip
        return out
