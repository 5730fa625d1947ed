"""Multi-head latent attention over a paged cache, in plain torch.

Rows that decode take their queries to the latents (absorbed): scores and mixture are of latents, and only the mixture
of each head is expanded. Chunks expand the latents of their context, so many at a time, and meet keys and values: for
many queries that is a third of the work. Both softmaxes are in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.elementwise import RopeTable
from worker.kernels.mla import LatentNorm, LatentPool, MlaKernel, MlaSpec
from worker.kernels.step import Step, StepBuffers
from worker.kernels.torch.elementwise import rotate
from worker.kernels.torch.slots import context_slots

MAX_SCORES = 1 << 24
"""That are in memory at a time."""
MAX_GATHERED = 1 << 26
"""Numbers of cache rows that are gathered at a time."""


@dataclass(frozen=True, slots=True)
class UniformRows:
    """C the longest context."""

    slots: Tensor
    """int64 [rows, C]; past a row's context that of its first token."""
    hidden: Tensor
    """bool [rows, uniform_len, C]: what a token does not see."""


@dataclass(frozen=True, slots=True)
class ChunkRow:
    num_tokens: int
    slots: Tensor
    """int64 [context]"""


@dataclass(frozen=True, slots=True)
class Metadata:
    positions: Tensor
    """int64 [T]"""
    write_slots: Tensor
    """int64 [T]; what writes nothing goes to the spare block."""
    uniform: UniformRows | None
    chunks: tuple[ChunkRow, ...]


def prepare_rows(step: Step, buffers: StepBuffers, block_size: int) -> Metadata:
    """What latent attention and its index need alike."""
    write_slots = buffers.token_slots[: step.num_tokens]
    if step.num_padding_rows:
        write_slots = torch.where(write_slots < 0, buffers.spare_block * block_size, write_slots)
    tables = buffers.block_tables[: step.num_rows, : -(-step.max_context_len // block_size)]
    uniform = None
    if num_rows := step.num_uniform_rows:
        lens = buffers.context_lens[:num_rows].long()[:, None]
        positions = torch.arange(step.max_context_len, device=tables.device)
        slots = context_slots(tables[:num_rows], step.max_context_len, block_size)
        slots = torch.where(positions < lens, slots, slots[:, :1])
        # Padding sees its first token, whatever that is.
        last_seen = (lens - step.uniform_len + torch.arange(step.uniform_len, device=tables.device)).clamp_(min=0)
        uniform = UniformRows(slots, positions > last_seen[:, :, None])
    chunks = tuple(
        ChunkRow(chunk.num_tokens, context_slots(tables[row, None], chunk.context_len, block_size)[0])
        for row, chunk in enumerate(step.chunks, step.num_uniform_rows)
    )
    return Metadata(buffers.positions[: step.num_tokens], write_slots, uniform, chunks)


def in_halves(x: Tensor) -> Tensor:
    """[..., (a0, b0, a1, b1, …)] → [..., (a0, a1, …, b0, b1, …)]"""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def rope_rows(rope: RopeTable, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [T, 1, P]."""
    return rope.cos.index_select(0, positions)[:, None], rope.sin.index_select(0, positions)[:, None]


class TorchMla(MlaKernel):
    """The cache is [blocks + spare, block_size, L + P]."""

    def __init__(self, spec: MlaSpec) -> None:
        self._spec = spec

    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> LatentPool:
        shape = (num_layers, num_blocks, block_size, self._spec.row_dim)
        pool = torch.empty(shape, dtype=self._spec.dtype, device=device)
        return LatentPool(list(pool), [pool.transpose(0, 1)])

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> Metadata:
        return prepare_rows(step, buffers, block_size)

    def write(
        self, x: Tensor, norm: LatentNorm, rope: RopeTable, cache: Tensor, metadata: Metadata
    ) -> tuple[Tensor, Tensor]:
        spec = self._spec
        heads, row = x.split((spec.num_heads * spec.head_dim, spec.row_dim), 1)
        q, latent = heads.unflatten(-1, (spec.num_heads, spec.head_dim)), row[:, : spec.latent_dim]
        plain = torch.cat((q[..., spec.nope_dim :], row[:, None, spec.latent_dim :]), 1)
        if spec.is_interleaved:
            plain = in_halves(plain)
        rotated = rotate(plain, *rope_rows(rope, metadata.positions))
        latent = functional.rms_norm(latent, (spec.latent_dim,), norm.weight, norm.eps)
        row = torch.cat((latent, rotated[:, -1]), -1)
        cache.flatten(0, 1).index_copy_(0, metadata.write_slots, row.to(cache.dtype))
        return q[..., : spec.nope_dim], rotated[:, :-1]

    def attend(
        self, q_nope: Tensor, q_rope: Tensor, cache: Tensor, expand: Tensor, metadata: Metadata,
        chosen: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if chosen is not None:
            is_none = chosen < 0
            # One of the chosen in place of none: what stands elsewhere may be NaN.
            slots = torch.where(is_none, chosen.amax(1, keepdim=True), chosen).clamp_(min=0).long()
            return self._absorbed(q_nope, q_rope, cache, expand, slots, is_none[:, None])
        parts, at = [], 0
        if (rows := metadata.uniform) is not None:
            at = rows.hidden.shape[0] * rows.hidden.shape[1]
            parts.append(self._absorbed(q_nope[:at], q_rope[:at], cache, expand, rows.slots, rows.hidden))
        for chunk in metadata.chunks:
            tokens = slice(at, at + chunk.num_tokens)
            parts.append(self._expanded(q_nope[tokens], q_rope[tokens], cache, expand, chunk.slots))
            at += chunk.num_tokens
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _absorbed(
        self, q_nope: Tensor, q_rope: Tensor, cache: Tensor, expand: Tensor, slots: Tensor, hidden: Tensor
    ) -> Tensor:
        """Of B rows of n tokens: q [B × n, H, ...], slots [B, C], hidden [B, n, C] → [B × n, H × V]"""
        spec, (num_rows, length) = self._spec, hidden.shape[:2]
        q_latent = torch.bmm(q_nope.transpose(0, 1), expand[:, : spec.nope_dim]).transpose(0, 1)
        queries = torch.cat((q_latent, q_rope), -1).view(num_rows, length * spec.num_heads, spec.row_dim)
        mixed = queries.new_empty(*queries.shape[:2], spec.latent_dim)
        num_together = max(1, MAX_GATHERED // (slots.shape[1] * spec.row_dim))
        for start in range(0, num_rows, num_together):
            at = slice(start, start + num_together)
            rows = cache.flatten(0, 1)[slots[at]].to(queries.dtype)
            scores = torch.bmm(queries[at], rows.transpose(1, 2)).float().mul_(spec.scale)
            by_token = scores.unflatten(1, (length, spec.num_heads)).masked_fill_(hidden[at, :, None], -torch.inf)
            weights = by_token.softmax(-1).flatten(1, 2).to(queries.dtype)
            mixed[at] = torch.bmm(weights, rows[..., : spec.latent_dim])
        by_head = mixed.view(-1, spec.num_heads, spec.latent_dim).transpose(0, 1)
        return torch.bmm(by_head, expand[:, spec.nope_dim :].transpose(1, 2)).transpose(0, 1).flatten(1)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, cache: Tensor, expand: Tensor, slots: Tensor) -> Tensor:
        """The last tokens of a row against all of it: q [n, H, ...], slots [C] → [n, H × V]. The context comes in
        pieces, with an online softmax."""
        spec, (num_tokens, num_heads), dtype = self._spec, q_nope.shape[:2], q_nope.dtype
        q_nope, q_rope = q_nope.transpose(0, 1), q_rope.transpose(0, 1)
        positions = torch.arange(len(slots), device=slots.device)
        best = q_nope.new_full((num_heads, num_tokens, 1), -torch.inf, dtype=torch.float32)
        total, mixed = torch.zeros_like(best), best.new_zeros(num_heads, num_tokens, spec.v_head_dim)
        for piece in positions.split(max(16, MAX_SCORES // (num_tokens * num_heads))):
            rows = cache.flatten(0, 1)[slots[piece]].to(dtype)
            latents, k_rope = rows.split((spec.latent_dim, spec.rope_dim), -1)
            k_nope, v = torch.matmul(latents, expand.transpose(1, 2)).split((spec.nope_dim, spec.v_head_dim), -1)
            scores = (torch.bmm(q_nope, k_nope.transpose(1, 2)) + torch.matmul(q_rope, k_rope.T)).float()
            is_hidden = piece > positions[len(slots) - num_tokens :, None]
            scores = scores.mul_(spec.scale).masked_fill_(is_hidden, -torch.inf)
            new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - new_best).exp_(), (best - new_best).exp_()
            total = total * shrink + weights.sum(-1, keepdim=True)
            mixed = mixed * shrink + torch.bmm(weights.to(dtype), v)
            best = new_best
        return (mixed / total).to(dtype).transpose(0, 1).flatten(1)
