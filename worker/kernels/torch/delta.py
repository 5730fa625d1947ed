"""Gated DeltaNet in plain torch: rows of one token all together, longer ones one after another, in chunks.

Within a chunk the corrections depend on each other: they solve a unit triangular system (the "WY" form; Yang et al.,
arXiv 2406.06484 and 2412.06464). All of it is float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.delta import DeltaKernel, DeltaParameters, DeltaSpec, DeltaState
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
    earlier: Tensor
    """int64 [W − 1]: where the inputs before it are."""
    first_kept: int
    """Of its tokens, the first whose input is kept."""
    kept_at: Tensor
    """int64: where those from there on are kept."""
    logged_at: Tensor | None
    """int64: where its tokens are logged; None: it is not tentative."""


@dataclass(frozen=True, slots=True)
class LateRow:
    group: Tensor
    """int64 [1]"""
    places: Tensor
    """int64: of what it makes up for in its log."""


@dataclass(frozen=True, slots=True)
class Metadata:
    num_single: int
    """Rows of one token, which come first."""
    groups: Tensor
    """int64 [num_single]"""
    earlier: Tensor
    """int64 [num_single, W − 1]: where the inputs before them are."""
    kept_at: Tensor
    """int64 [num_single]: where theirs are kept."""
    long: tuple[LongRow, ...]
    late: tuple[LateRow, ...]


class TorchDelta(DeltaKernel):
    def __init__(self, spec: DeltaSpec) -> None:
        self._spec = spec

    def prepare(self, step: Step, buffers: StepBuffers, lag: Tensor | None) -> Metadata:
        num_single = step.num_uniform_rows if step.uniform_len == 1 else 0
        lens = [step.uniform_len] * (step.num_uniform_rows - num_single) + [chunk.num_tokens for chunk in step.chunks]
        groups = buffers.groups[: step.num_rows]
        before = torch.arange(1 - self._spec.width, 0, device=groups.device)
        long, start = [], num_single
        for row, num_tokens in enumerate(lens, num_single):
            positions = buffers.positions[start : start + num_tokens]
            long.append(self._long_row(groups[row : row + 1], positions, start, before))
            start += num_tokens
        positions, num_kept = buffers.positions[:num_single], self._spec.num_inputs
        earlier = (positions[:, None] + before) % num_kept
        late = () if lag is None else self._late_rows(groups, buffers, lag)
        return Metadata(num_single, groups[:num_single], earlier, positions % num_kept, tuple(long), late)

    def _long_row(self, group: Tensor, positions: Tensor, start: int, before: Tensor) -> LongRow:
        spec, num_tokens = self._spec, len(positions)
        first_kept = max(num_tokens - spec.num_inputs, 0)
        earlier, kept_at = (places % spec.num_inputs for places in (positions[:1] + before, positions[first_kept:]))
        logged_at = positions % spec.log_size[0] if 1 < num_tokens <= spec.most_tentative else None
        return LongRow(group, start, start + num_tokens, earlier, start + first_kept, kept_at, logged_at)

    def _late_rows(self, groups: Tensor, buffers: StepBuffers, lag: Tensor) -> tuple[LateRow, ...]:
        late = []
        for row, num in enumerate(lag.tolist()):
            if num:
                first = buffers.positions[buffers.query_starts[row]] - num
                places = (first + torch.arange(num, device=lag.device)) % self._spec.log_size[0]
                late.append(LateRow(groups[row : row + 1], places))
        return tuple(late)

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return () if self._spec.num_drafts else (max_context_len,)  # which rows are late is read back

    def convolve(self, x: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: Metadata) -> Tensor:
        taps = parameters.taps
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if metadata.num_single:
            single, groups = x[: metadata.num_single], metadata.groups
            inputs = torch.cat((state.inputs[groups[:, None], metadata.earlier], single[:, None]), 1)
            state.inputs.index_put_((groups, metadata.kept_at), single)
            out[: metadata.num_single] = functional.silu((inputs.float() * taps.T).sum(1))
        for row in metadata.long:
            inputs = torch.cat((state.inputs[row.group, row.earlier], x[row.start : row.end]))
            state.inputs.index_put_((row.group, row.kept_at), x[row.first_kept : row.end])
            mixed = functional.conv1d(inputs.float().T, taps[:, None], groups=len(taps))
            out[row.start : row.end] = functional.silu(mixed).T
        return out

    def update(
        self, qkv: Tensor, a: Tensor, b: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: Metadata
    ) -> Tensor:
        spec = self._spec
        self._catch_up(parameters, state, metadata)
        queries, keys, values = qkv.float().split((spec.key_size, spec.key_size, spec.value_size), -1)
        q, k, v = self._keys(queries) * spec.key_dim**-0.5, self._keys(keys), self._values(values)
        decay, beta = _gates(a, b, parameters)
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
            if row.logged_at is None:
                state.recurrent.index_copy_(0, row.group, current[None])
            else:
                at = slice(row.start, row.end)
                logged = torch.cat((qkv[at, spec.key_size :], a[at], b[at]), -1)
                state.log.index_put_((row.group, row.logged_at), logged)
        return out

    def _catch_up(self, parameters: DeltaParameters, state: DeltaState, metadata: Metadata) -> None:
        spec, heads = self._spec, self._spec.num_value_heads
        for row in metadata.late:
            logged = state.log[row.group, row.places].float()
            keys, values, a, b = logged.split((spec.key_size, spec.value_size, heads, heads), -1)
            tokens = take_in(
                self._keys(keys), self._values(values), *_gates(a, b, parameters), state.recurrent[row.group][0]
            )
            state.recurrent.index_copy_(0, row.group, tokens.state[None])

    def _keys(self, x: Tensor) -> Tensor:
        """Of keys, or queries, [T, K × N] → [T, H, N], normed."""
        spec = self._spec
        x = x.unflatten(-1, (spec.num_key_heads, spec.key_dim))
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
        return x.repeat_interleave(spec.num_value_heads // spec.num_key_heads, 1)

    def _values(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self._spec.num_value_heads, self._spec.value_dim))


def _gates(a: Tensor, b: Tensor, parameters: DeltaParameters) -> tuple[Tensor, Tensor]:
    """(log decay, beta), float32."""
    decay = -parameters.log_decay.exp() * functional.softplus(a.float() + parameters.bias)
    return decay, b.float().sigmoid()


def step_once(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row: q and k [R, H, N], v [R, H, V], log decay and beta [R, H], state [R, H, N, V] → the
    output [R, H, V] and the new state."""
    state = state * decay.exp()[..., None, None]
    correction = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state = state + k[..., :, None] * correction[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """L tokens of one row that the state has taken in, float32."""

    keys: Tensor
    """[H, L, N]"""
    corrections: Tensor
    """[H, L, V]"""
    between: Tensor
    """[H, L, L]: what is left of a token's correction at a later one, which comes first."""
    since_start: Tensor
    """[H, L, 1]: what is left of the state before them."""
    state: Tensor
    """[H, N, V]: after the last."""


def take_in(k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> ChunkTokens:
    """L tokens of one row: k [L, H, N], v [L, H, V], log decay and beta [L, H], state [H, N, V]."""
    k, v, beta = k.transpose(0, 1), v.transpose(0, 1), beta.T[..., None]
    # Float64: sums of decays are large, and what two of them differ by is small.
    total = decay.double().cumsum(0).T
    # Exp of a positive number could overflow.
    between = (total[:, :, None] - total[:, None, :]).tril().float().exp().tril()
    since_start = total.float().exp()[..., None]
    system = (k * beta) @ k.mT * between
    wanted = (v - (k * since_start) @ state) * beta
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    until_end = (total[:, -1:] - total).float().exp()[..., None]
    state = state * since_start[:, -1:] + (k * until_end).mT @ corrections
    return ChunkTokens(k, corrections, between, since_start, state)


def step_chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `take_in`, and q [L, H, N] → the outputs [L, H, V] and the state after the last."""
    q, tokens = q.transpose(0, 1), take_in(k, v, decay, beta, state)
    out = (q * tokens.since_start) @ state + (q @ tokens.keys.mT * tokens.between) @ tokens.corrections
    return out.transpose(0, 1), tokens.state


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `GatedNormKernel`."""
    wide = x.float()
    normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed * functional.silu(gate.float())).to(x.dtype).flatten(-2)
