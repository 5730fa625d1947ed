"""The sum over ranks, the residual and the norm behind it in one kernel, through memory that the ranks read directly.

A rank's program meets those of the same row on the other ranks in flags in their memory, reads all ranks' parts of the
row and adds them up in the order of the ranks, so that all get the same bits. For few rows the time is that of the
meeting and of one read over NVLink; whatever else is a kernel of its own costs more than it does. (One-shot all-reduce,
as in NVIDIA's TensorRT-LLM and PyTorch's symmetric memory.)
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before
from worker.parallel.symmetric import Parts

MOST_ROWS = 256
"""Above, every rank reading all parts is more traffic than it saves time."""


@triton.jit
def _meet(signals, meeting, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Returns once all ranks are here; flags are 0 again then. What they wrote before can be read."""
    flag = tl.pointer_type(tl.int32)
    for other in tl.static_range(SIZE):
        if other != RANK:
            theirs = tl.load(signals + other).to(flag) + meeting * SIZE + RANK
            while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
                pass
    for other in tl.static_range(SIZE):
        if other != RANK:
            ours = tl.load(signals + RANK).to(flag) + meeting * SIZE + other
            while tl.atomic_cas(ours, 1, 0, sem="acquire", scope="sys") != 1:
                pass


@triton.jit
def _sum_norm_kernel(
    buffers, signals, offset, residual, weight, out, eps, N: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a row; `offset`: of the parts in the buffers, in elements."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    _meet(signals, row, RANK, SIZE)
    at = offset + row * N + column
    values = tl.load(residual + row * N + column, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(SIZE):
        part = tl.load(buffers + rank).to(tl.pointer_type(residual.dtype.element_ty))
        values += tl.load(part + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    rounded = values.to(residual.dtype.element_ty)
    tl.store(residual + row * N + column, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values) / N + eps)
    scaled = values * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + column, scaled.to(out.dtype.element_ty), mask=inside)


def sum_and_norm(
    parts: Parts, residual: Tensor, weight: Tensor, eps: float, *, overlaps: bool, num_warps: int
) -> Tensor:
    """residual [R, N] += the sum of all ranks' parts [R, N], in place; returns its norm, a new tensor.

    A part may be overwritten once the sum after this one is done: whoever is there has read it.
    """
    out = residual.new_empty(residual.shape)
    num_rows, size = residual.shape
    _sum_norm_kernel[(num_rows,)](
        parts.buffers, parts.flags, parts.offset // residual.element_size(), residual, weight, out, eps, size,
        triton.next_power_of_2(size), parts.rank, len(parts.buffers), overlaps, num_warps=num_warps,
        **launch_options(overlaps),
    )  # fmt: skip
    return out
