"""The index of DeepSeek-V3.2's sparse attention, in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.elementwise import RopeTable
from worker.kernels.mla import IndexKernel, IndexNorm, IndexSpec, LatentPool
from worker.kernels.step import Step, StepBuffers
from worker.kernels.torch.elementwise import rotate
from worker.kernels.torch.mla import MAX_SCORES, Metadata, prepare_rows, rope_rows


@dataclass(frozen=True, slots=True)
class IndexMetadata:
    rows: Metadata
    has_more: bool
    """A row may have more tokens than are chosen."""


class TorchIndex(IndexKernel):
    """The cache is [blocks + spare, block_size, D]."""

    def __init__(self, spec: IndexSpec) -> None:
        self._spec = spec

    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> LatentPool:
        shape = (num_layers, num_blocks, block_size, self._spec.head_dim)
        pool = torch.empty(shape, dtype=self._spec.dtype, device=device)
        return LatentPool(list(pool), [pool.transpose(0, 1)])

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> IndexMetadata:
        return IndexMetadata(prepare_rows(step, buffers, block_size), step.max_context_len > self._spec.top_k)

    def write(
        self, x: Tensor, norm: IndexNorm, rope: RopeTable, cache: Tensor, metadata: IndexMetadata
    ) -> tuple[Tensor, Tensor]:
        spec = self._spec
        heads, key, weights = x.split((spec.num_heads * spec.head_dim, spec.head_dim, spec.num_heads), 1)
        key = functional.layer_norm(key, (spec.head_dim,), norm.weight, norm.bias, norm.eps)
        both = torch.cat((heads.unflatten(-1, (spec.num_heads, -1)), key[:, None]), 1)
        rotated = rotate(both[..., : spec.rope_dim], *rope_rows(rope, metadata.rows.positions))
        both = torch.cat((rotated, both[..., spec.rope_dim :]), -1)
        cache.flatten(0, 1).index_copy_(0, metadata.rows.write_slots, both[:, -1].to(cache.dtype))
        return both[:, :-1], weights

    def choose(self, q: Tensor, weights: Tensor, cache: Tensor, metadata: IndexMetadata) -> Tensor | None:
        if not metadata.has_more:
            return None
        rows, parts, at = metadata.rows, [], 0
        if (uniform := rows.uniform) is not None:
            num_rows, length, longest = uniform.hidden.shape
            at = num_rows * length
            # One row at a time would bound what is gathered, but ask the device for each.
            keys = cache.flatten(0, 1)[uniform.slots].to(q.dtype)
            scores = self._scores(q[:at].unflatten(0, (num_rows, length)), weights[:at], keys)
            slots = uniform.slots[:, None].expand(-1, length, -1)
            parts.append(self._best(scores.view(at, longest), uniform.hidden.view(at, longest), slots.reshape(at, -1)))
        for chunk in rows.chunks:
            keys = cache.flatten(0, 1)[chunk.slots].to(q.dtype)
            positions = torch.arange(len(chunk.slots), device=q.device)
            own = positions[len(positions) - chunk.num_tokens :]
            for piece in own.split(max(1, MAX_SCORES // (len(positions) * self._spec.num_heads))):
                tokens = slice(at, at + len(piece))
                scores = self._scores(q[None, tokens], weights[tokens], keys[None])[0]
                parts.append(self._best(scores, positions > piece[:, None], chunk.slots.expand(len(piece), -1)))
                at += len(piece)
        return torch.cat(parts)

    def _scores(self, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """q [B, n, H, D], weights [B × n, H], keys [B, C, D] → float32 [B, n, C]. Positive factors that all scores
        share are left out."""
        products = torch.bmm(q.flatten(1, 2).float(), keys.float().transpose(1, 2)).relu_()
        by_head = products.unflatten(1, q.shape[1:3])
        return (weights.float().view(*q.shape[:3], 1) * by_head).sum(2)

    def _best(self, scores: Tensor, hidden: Tensor, slots: Tensor) -> Tensor:
        """scores, hidden, slots [n, C] → int32 [n, top_k]"""
        most = min(self._spec.top_k, scores.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
        least = scores.topk(most, sorted=False).values.amin(1, keepdim=True)
        above, equal = scores > least, scores == least
        earliest = equal & (equal.cumsum(1) <= most - above.sum(1, keepdim=True))
        is_chosen = (above | earliest) & ~hidden
        places = (is_chosen.cumsum(1) - 1).masked_fill_(~is_chosen, most)
        chosen = torch.full((len(scores), self._spec.top_k + 1), -1, dtype=torch.int32, device=scores.device)
        chosen.scatter_(1, places, slots.int())
        chosen[:, most:] = -1
        return chosen[:, : self._spec.top_k]
