"""Gated DeltaNet in plain torch: rows of one token all together, longer ones one after another, in chunks.

Within a chunk the corrections depend on each other: they solve a unit triangular system (the "WY" form; Yang et al.,
arXiv 2406.06484 and 2412.06464). All of it is float32.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.delta import DeltaParameters, DeltaSpec, DeltaState
from worker.kernels.step import Step, StepBuffers

CHUNK = 64
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LongRow:
    group: Tensor
    """int64 [1]"""
    start: int
    """First token."""
    end: int


@dataclass(frozen=True, slots=True)
class Metadata:
    num_single: int
    """Rows of one token, which come first."""
    groups: Tensor
    """int64 [num_single]"""
    long: tuple[LongRow, ...]


class TorchDelta:
    """See `DeltaKernel`."""

    def __init__(self, spec: DeltaSpec) -> None:
        self._spec = spec

    def prepare(self, step: Step, buffers: StepBuffers) -> Metadata:
        num_single = step.num_uniform_rows if step.uniform_len == 1 else 0
        lens = [step.uniform_len] * (step.num_uniform_rows - num_single) + [chunk.num_tokens for chunk in step.chunks]
        long, start = [], num_single
        for row, num_tokens in enumerate(lens, num_single):
            long.append(LongRow(buffers.groups[row : row + 1], start, start + num_tokens))
            start += num_tokens
        return Metadata(num_single, buffers.groups[:num_single], tuple(long))

    def can_capture(self) -> bool:
        return True

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        return ()

    def convolve(self, x: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: Metadata) -> Tensor:
        width, taps = self._spec.width, parameters.taps
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if metadata.num_single:
            single = x[: metadata.num_single]
            inputs = torch.cat((state.inputs[metadata.groups], single[:, None]), 1)
            state.inputs.index_copy_(0, metadata.groups, inputs[:, 1:])
            out[: metadata.num_single] = functional.silu((inputs.float() * taps.T).sum(1))
        for row in metadata.long:
            inputs = torch.cat((state.inputs[row.group][0], x[row.start : row.end]))
            state.inputs.index_copy_(0, row.group, inputs[None, len(inputs) - width + 1 :])
            mixed = functional.conv1d(inputs.float().T, taps[:, None], groups=len(taps))
            out[row.start : row.end] = functional.silu(mixed).T
        return out

    def update(
        self, qkv: Tensor, a: Tensor, b: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: Metadata
    ) -> Tensor:
        q, k, v = self._heads(qkv.float())
        decay = -parameters.log_decay.exp() * functional.softplus(a.float() + parameters.bias)
        beta = b.float().sigmoid()
        out = qkv.new_empty(v.shape)
        if num := metadata.num_single:
            found, new = step_once(q[:num], k[:num], v[:num], decay[:num], beta[:num], state.recurrent[metadata.groups])
            state.recurrent.index_copy_(0, metadata.groups, new)
            out[:num] = found
        for row in metadata.long:
            current = state.recurrent[row.group][0]
            for start in range(row.start, row.end, CHUNK):
                at = slice(start, min(start + CHUNK, row.end))
                found, current = step_chunk(q[at], k[at], v[at], decay[at], beta[at], current)
                out[at] = found
            state.recurrent.index_copy_(0, row.group, current[None])
        return out

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32 [T, H, N] twice, [T, H, V]; queries and keys normed, queries scaled."""
        spec = self._spec
        q, k, v = qkv.split((spec.key_size, spec.key_size, spec.value_size), -1)
        q, k = (_normed(x.unflatten(-1, (spec.num_key_heads, spec.key_dim))) for x in (q, k))
        repeats = spec.num_value_heads // spec.num_key_heads
        q, k = ((q * spec.key_dim**-0.5).repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1))
        return q, k, v.unflatten(-1, (spec.num_value_heads, spec.value_dim))


def step_once(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row: q and k [R, H, N], v [R, H, V], log decay and beta [R, H], state [R, H, N, V] → the
    output [R, H, V] and the new state."""
    state = state * decay.exp()[..., None, None]
    correction = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state = state + k[..., :, None] * correction[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def step_chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """L tokens of one row: q and k [L, H, N], v [L, H, V], log decay and beta [L, H], state [H, N, V] → the outputs
    [L, H, V] and the state after the last."""
    q, k, v, beta = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), beta.T[..., None]
    # Float64: sums of decays are large, and what two of them differ by is small.
    total = decay.double().cumsum(0).T
    # Between two tokens of the chunk, the later one first; exp of a positive number could overflow.
    between = (total[:, :, None] - total[:, None, :]).tril().float().exp().tril()
    since_start = total.float().exp()[..., None]
    system = (k * beta) @ k.mT * between
    wanted = (v - (k * since_start) @ state) * beta
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (q * since_start) @ state + (q @ k.mT * between) @ corrections
    until_end = (total[:, -1:] - total).float().exp()[..., None]
    return out.transpose(0, 1), state * since_start[:, -1:] + (k * until_end).mT @ corrections


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `GatedNormKernel`."""
    wide = x.float()
    normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed * functional.silu(gate.float())).to(x.dtype).flatten(-2)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
