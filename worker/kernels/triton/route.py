"""The choice of a row's experts, and, for few rows, the norm and the router's product before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.experts import RouteKernel, RouteSpec
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before

MAX_NORM_ROWS = 16
"""Whose norm is worked out by every program of the router's product."""
WIDEST_NORM = 8192
"""Elements of a row that a program holds."""
NORM_EXPERTS = 4
"""Of a program, with several rows."""
LEAST = tl.constexpr(-(1 << 31))
NOBODY = tl.constexpr(1 << 30)
"""Behind every expert's number."""


@triton.jit
def _ordered(value):
    """int32 in the order of float32 numbers, never `LEAST`."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST + 1)


@triton.jit
def _places(keys, index, COUNT: tl.constexpr):
    """Each key's place in descending order, equal ones by index; COUNT where it is not among the first. Keys are whole
    numbers because the largest of a warp's is one instruction."""
    places = tl.full(keys.shape, COUNT, tl.int32)
    for place in tl.static_range(COUNT):
        largest = tl.max(keys, 0)
        first = tl.min(tl.where(keys == largest, index, NOBODY), 0)
        places = tl.where(index == first, place, places)
        keys = tl.where(index == first, LEAST, keys)
    return places


@triton.jit
def _are_in_top_groups(choice, is_expert, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """choice [groups, experts]: whether a group is among those with the largest sums of two experts, [groups, 1]."""
    values = tl.where(is_expert, choice, float("-inf"))
    best, best_at = tl.max(values, 1, return_indices=True)
    others = tl.where(tl.arange(0, values.shape[1])[None, :] == best_at[:, None], float("-inf"), values)
    group = tl.arange(0, values.shape[0])
    keys = tl.where(group < GROUPS, _ordered(best + tl.max(others, 1)), LEAST)
    return (_places(keys, group, TOP_GROUPS) < TOP_GROUPS)[:, None]


@triton.jit
def _route_kernel(
    logits, bias, weights, ids, scale, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_GROUPS: tl.constexpr, IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_NORMALISED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A row's experts: GROUPS times SIZE. Of as many as there are, none is chosen twice, whatever the logits are."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)[:, None]
    member = tl.arange(0, BLOCK_SIZE)[None, :]
    is_expert = (group < GROUPS) & (member < SIZE)
    # What fills a group up must not have a number of the next group's: it would be chosen with that expert, and which
    # of the two is stored is nobody's choice.
    expert = tl.where(is_expert, group * SIZE + member, NOBODY)
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    logit = tl.load(logits + row * GROUPS * SIZE + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit))
        if HAS_BIAS or not IS_NORMALISED:
            score /= tl.sum(score)
    choice = score if IS_SIGMOID or HAS_BIAS else logit
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=is_expert, other=0.0)
    keys = tl.where(is_expert, _ordered(choice), LEAST)
    if TOP_GROUPS < GROUPS:
        keys = tl.where(_are_in_top_groups(choice, is_expert, GROUPS, TOP_GROUPS), keys, LEAST)
    keys = tl.reshape(keys, [BLOCK_GROUPS * BLOCK_SIZE])
    expert = tl.reshape(expert, [BLOCK_GROUPS * BLOCK_SIZE])
    score = tl.reshape(score, [BLOCK_GROUPS * BLOCK_SIZE])
    place = _places(keys, expert, TOP_K)
    is_chosen = place < TOP_K
    if IS_NORMALISED:
        score /= tl.sum(tl.where(is_chosen, score, 0.0)) + 1e-20
    tl.store(weights + row * TOP_K + place, score * scale, mask=is_chosen)
    tl.store(ids + row * TOP_K + place, expert, mask=is_chosen)


@triton.jit
def _norm_router_kernel(
    x, residual, norm_weight, router, bias, new_residual, hidden, logits, eps, num_experts, N: tl.constexpr,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The logits of a row and some experts; each program works out the norm of x + residual anew, the first leaves both
    for the experts."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    column = tl.arange(0, BLOCK)
    inside = column < N
    scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(router + expert[:, None] * N + column[None, :], mask=is_expert[:, None] & inside[None, :], other=0.0)
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    values = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(residual + row * N + column, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(residual.dtype.element_ty)
    values = rounded.to(tl.float32)
    scale *= 1 / tl.sqrt(tl.sum(values * values) / N + eps)
    normed = (values * scale).to(hidden.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(new_residual + row * N + column, rounded, mask=inside)
        tl.store(hidden + row * N + column, normed, mask=inside)
    logit = tl.sum(w.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    if HAS_BIAS:
        logit += tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)
    tl.store(logits + row * num_experts + expert, logit, mask=is_expert)


class TritonRoute(RouteKernel):
    def __init__(self, spec: RouteSpec, machine: Machine) -> None:
        self._spec, self._machine = spec, machine
        self._size = spec.num_experts // spec.num_groups
        self._block_size, self._block_groups = map(triton.next_power_of_2, (self._size, spec.num_groups))

    def __call__(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        spec, num_rows = self._spec, len(logits)
        weights = torch.empty(num_rows, spec.top_k, dtype=torch.float32, device=logits.device)
        ids = torch.empty(num_rows, spec.top_k, dtype=torch.int32, device=logits.device)
        overlaps = self._machine.overlaps(num_rows)
        _route_kernel[(num_rows,)](
            logits, logits if bias is None else bias, weights, ids, spec.scale, self._size, spec.num_groups,
            spec.num_top_groups, spec.top_k, self._block_size, self._block_groups, spec.is_sigmoid, bias is not None,
            spec.is_normalised, overlaps, num_warps=1, **launch_options(overlaps),
        )  # fmt: skip
        return weights, ids

    def of_norm(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, router: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """(logits, the norm of residual + x, residual + x), all new, of few rows; None of more."""
        num_rows, width = x.shape
        if not 0 < num_rows <= MAX_NORM_ROWS or width > WIDEST_NORM:
            return None
        num_experts, overlaps = len(router), self._machine.overlaps(num_rows)
        logits = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x.device)
        hidden, new_residual = torch.empty_like(x), torch.empty_like(residual)
        together = 1 if num_rows == 1 else NORM_EXPERTS
        _norm_router_kernel[(num_rows, triton.cdiv(num_experts, together))](
            x, residual, norm_weight, router, router if bias is None else bias, new_residual, hidden, logits, eps,
            num_experts, width, triton.next_power_of_2(width), together, bias is not None, overlaps,
            num_warps=8 if width > 2048 else 4, **launch_options(overlaps),
        )  # fmt: skip
        return logits, hidden, new_residual
