"""Norms, activation, embedding: one pass over the data each."""

import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.elementwise import Activation, EmbeddingKernel, GatedActivationKernel, RmsNormKernel
from worker.kernels.triton.launch import Launches
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before
from worker.kernels.triton.sum_norm import norm_of_parts, sum_and_norm
from worker.parallel.group import Group

WIDEST_NORM = 1 << 15
"""Elements of a row that one program holds in its registers."""
ACTIVATION_TILE = 1024
EMBEDDING_TILE = 1024


@triton.jit
def _norm_kernel(
    x, residual, weight, out, eps, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a row. With a residual: residual += x first, rounded as it is stored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    let_next_begin(OVERLAPS)
    scales = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_kernel_before(OVERLAPS)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * N + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * N + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values) / N + eps)
    scaled = values * scale * scales
    tl.store(out + row * N + column, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_activation_kernel(x, out, N, BLOCK: tl.constexpr, IS_SILU: tl.constexpr, OVERLAPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    gate = tl.load(x + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    # The GELU's (1 + tanh(y)) / 2 is the logistic function of 2 y.
    turned = gate if IS_SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * N + column, (gate / (1 + tl.exp(-turned)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embedding_kernel(
    ids, table, out, residual, first, num_rows, N, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """In this order: what is behind it begins when the step's preparation has ended, see `overlap`."""
    wait_for_kernel_before(OVERLAPS)
    let_next_begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token) - first
    is_here = (row >= 0) & (row < num_rows)
    values = tl.load(table + row * N + column, mask=is_here & (column < N), other=0.0)
    tl.store(out + token * N + column, values, mask=column < N)
    if HAS_RESIDUAL:
        tl.store(residual + token * N + column, tl.zeros_like(values), mask=column < N)


class TritonRmsNorm(RmsNormKernel):
    def __init__(self, size: int, machine: Machine) -> None:
        self._machine, self._launches = machine, Launches()
        self._size, self._block = size, triton.next_power_of_2(size)
        self._num_warps = min(16, max(1, self._block // 512))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, self._size)
        out = rows.new_empty(rows.shape)
        self._launch(rows, rows, weight, out, eps, has_residual=False)
        return out.view(x.shape)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Group) -> tuple[Tensor, Tensor]:
        inboxes = group.inboxes
        if inboxes is not None and inboxes.hold(x) and weight.dtype == x.dtype:
            overlaps = self._machine.overlaps(len(x))
            x = sum_and_norm(x, residual, weight, eps, inboxes, overlaps=overlaps, num_warps=self._num_warps)
            return x, residual
        if (parts := group.parts(x)) is not None:
            return norm_of_parts(parts, residual, weight, eps, num_warps=self._num_warps), residual
        x = group.all_reduce(x)
        self._launch(x, residual, weight, x, eps, has_residual=True)
        return x, residual

    def _launch(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, has_residual: bool
    ) -> None:
        overlaps = self._machine.overlaps(len(x))
        self._launches(
            _norm_kernel, (len(x),),
            x, residual, weight, out, eps, x.stride(0), self._size, self._block, has_residual,
            overlaps, num_warps=self._num_warps, **launch_options(overlaps),
        )  # fmt: skip


class TritonGatedActivation(GatedActivationKernel):
    def __init__(self, kind: Activation, machine: Machine) -> None:
        self._is_silu, self._machine, self._launches = kind == "silu", machine, Launches()

    def __call__(self, x: Tensor) -> Tensor:
        num_tokens, width = x.shape
        out = x.new_empty(num_tokens, width // 2)
        overlaps = self._machine.overlaps(num_tokens)
        self._launches(
            _gated_activation_kernel, (num_tokens, triton.cdiv(width // 2, ACTIVATION_TILE)),
            x, out, width // 2, ACTIVATION_TILE, self._is_silu, overlaps, num_warps=4, **launch_options(overlaps),
        )  # fmt: skip
        return out


class TritonEmbedding(EmbeddingKernel):
    def __init__(self, machine: Machine) -> None:
        self._overlaps = machine.can_overlap

    def __call__(self, ids: Tensor, table: Tensor, first: int | None = None, residual: Tensor | None = None) -> Tensor:
        num_rows, size = table.shape
        out = table.new_empty(len(ids), size)
        _embedding_kernel[(len(ids), triton.cdiv(size, EMBEDDING_TILE))](
            ids, table, out, residual, first or 0, num_rows, size, EMBEDDING_TILE, residual is not None,
            self._overlaps, num_warps=4, **launch_options(self._overlaps),
        )  # fmt: skip
        return out
