"""Rows of a step for latent attention and its index, with their exact results."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.kernels.rig import Rig, Row, buffers_for, fill_step, scatter
from worker.kernels.elementwise import RopeTable
from worker.kernels.mla import INDEX, MLA, IndexNorm, IndexSpec, LatentNorm, MlaSpec

POSITIONS, EPS = 400, 1e-6


def mla_spec(rig: Rig, num_heads: int = 3, **changes: object) -> MlaSpec:
    spec = MlaSpec(num_heads, latent_dim=32, rope_dim=16, nope_dim=16, v_head_dim=32, scale=0.2, dtype=rig.dtype)
    return replace(spec, **changes)


def index_spec(rig: Rig, top_k: int) -> IndexSpec:
    return IndexSpec(num_heads=5, head_dim=32, rope_dim=16, top_k=top_k, dtype=rig.dtype)


def rope_table(rig: Rig, dim: int) -> RopeTable:
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.arange(POSITIONS)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return RopeTable(
        torch.cat((cos, cos), -1).to(rig.device, rig.dtype), torch.cat((-sin, sin), -1).to(rig.device, rig.dtype)
    )


def rotated(x: Tensor, rope: RopeTable, positions: Tensor, *, is_interleaved: bool) -> Tensor:
    """[T, heads, P] in float64, in halves."""
    x = x.double()
    first, second = (x[..., ::2], x[..., 1::2]) if is_interleaved else x.chunk(2, -1)
    cos = rope.cos.double()[positions, None].chunk(2, -1)[0]
    sin = rope.sin.double()[positions, None].chunk(2, -1)[1]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class LatentRows:
    """Caches hold the rows' histories scattered over blocks, NaN elsewhere. See `rig.Rows`."""

    def __init__(
        self,
        rig: Rig,
        spec: MlaSpec,
        query_lens: list[int],
        context_lens: list[int],
        block_size: int,
        *,
        uniform_len: int = 1,
        num_padding: int = 0,
        top_k: int | None = None,
    ) -> None:
        self.rig, self.spec, self.block_size = rig, spec, block_size
        self.kernel = rig.choose(MLA, spec)
        self.index_spec = index_spec(rig, top_k or 1)
        self.index = None if top_k is None else rig.choose(INDEX, self.index_spec)
        self.rows, num_uniform, num_blocks = scatter(query_lens, context_lens, block_size, uniform_len, num_padding)
        self.buffers = buffers_for(self.rows, num_blocks, rig.device)
        self.pool = self.kernel.allocate(2, num_blocks + 1, block_size, rig.device)
        pools = [self.pool]
        if self.index is not None:
            pools.append(self.index.allocate(2, num_blocks + 1, block_size, rig.device))
        for pool in pools:
            for entry in pool.entries:
                assert len(entry) == num_blocks + 1
                entry.fill_(torch.nan)
        self.caches = [pool.layers[1] for pool in pools]
        self.rope = rope_table(rig, spec.rope_dim)
        self.norm = LatentNorm(1 + 0.2 * rig.noise(spec.latent_dim, seed=7), EPS)
        gain, shift = (0.2 * rig.noise(self.index_spec.head_dim, seed=seed) for seed in (8, 9))
        self.index_norm = IndexNorm(1 + gain, shift, EPS)
        self.expand = rig.noise(spec.num_heads, spec.nope_dim + spec.v_head_dim, spec.latent_dim, seed=6) * 0.3
        # The histories, written by a step of their own; then the step itself.
        before = [Row(n, n, row.table) for row in self.rows if (n := row.context_len - row.num_tokens) > 0]
        self.old_x, self.old_index = self._inputs(sum(row.num_tokens for row in before), seed=2)
        if before:
            self._write(before, 0, 1, 0, self.old_x, self.old_index)
        self.before = [entry.clone() for pool in pools for entry in pool.entries]
        self.x, self.index_x = self._inputs(sum(row.num_tokens for row in self.rows), seed=1)
        self._write(self.rows, num_uniform, uniform_len, num_padding, self.x, self.index_x)
        self.after = [entry for pool in pools for entry in pool.entries]

    def _inputs(self, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        width = self.spec.num_heads * self.spec.head_dim + self.spec.row_dim
        x = self.rig.noise(num_tokens, width, seed=seed)
        return x, self.rig.noise(num_tokens, self.index_spec.width, seed=seed + 10)

    def _write(
        self, rows: list[Row], num_uniform: int, uniform_len: int, num_padding: int, x: Tensor, index_x: Tensor
    ) -> None:
        step = fill_step(self.buffers, rows, num_uniform, uniform_len, num_padding, self.block_size)
        self.metadata = self.kernel.prepare(step, self.buffers, self.block_size)
        self.q = self.kernel.write(x.clone(), self.norm, self.rope, self.caches[0], self.metadata)
        if self.index is not None:
            self.index_metadata = self.index.prepare(step, self.buffers, self.block_size)
            self.index_q, self.weights = self.index.write(
                index_x.clone(), self.index_norm, self.rope, self.caches[1], self.index_metadata
            )

    def attend(self) -> Tensor:
        """Of all tokens but padding."""
        chosen = self.chosen()
        return self.kernel.attend(*self.q, self.caches[0], self.expand, self.metadata, chosen)[self._is_real]

    def chosen(self) -> Tensor | None:
        if self.index is None:
            return None
        return self.index.choose(self.index_q, self.weights, self.caches[1], self.index_metadata)

    @property
    def _is_real(self) -> Tensor:
        return torch.tensor([row.context_len > 0 for row in self.rows for _ in range(row.num_tokens)])

    def exact(self) -> Tensor:
        """As it is written in the papers, with keys and values, in float64: [T, H × V], without padding."""
        outs, old_at, new_at = [], 0, 0
        for row in self.rows:
            old_end, new_end = old_at + max(0, row.context_len - row.num_tokens), new_at + row.num_tokens
            if row.context_len:
                x = torch.cat((self.old_x[old_at:old_end], self.x[new_at:new_end]))
                index_x = torch.cat((self.old_index[old_at:old_end], self.index_x[new_at:new_end]))
                hidden = self._hidden(index_x, row.num_tokens)
                outs.append(self._exact_row(x, row.num_tokens, hidden))
            old_at, new_at = old_end, new_end
        return torch.cat(outs)

    def _hidden(self, index_x: Tensor, num_tokens: int) -> Tensor:
        """bool [tokens, context]"""
        positions = torch.arange(len(index_x), device=index_x.device)
        hidden = positions > positions[len(index_x) - num_tokens :, None]
        if self.index is None:
            return hidden
        spec, norm = self.index_spec, self.index_norm
        q, k, weights = index_x.split((spec.num_heads * spec.head_dim, spec.head_dim, spec.num_heads), 1)
        k = torch.nn.functional.layer_norm(
            k.double(), (spec.head_dim,), norm.weight.double(), norm.bias.double(), norm.eps
        )
        both = torch.cat((q.double().unflatten(-1, (spec.num_heads, -1)), k[:, None]), 1)
        turned = rotated(both[..., : spec.rope_dim], self.rope, positions, is_interleaved=False)
        both = torch.cat((turned, both[..., spec.rope_dim :]), -1).to(self.rig.dtype).double()
        products = torch.einsum("qhd,kd->qhk", both[-num_tokens:, :-1], both[:, -1]).relu()
        scores = torch.einsum("qh,qhk->qk", weights[-num_tokens:].double(), products).masked_fill(hidden, -torch.inf)
        best = scores.topk(min(spec.top_k, len(positions)), -1).indices
        return hidden | torch.ones_like(hidden).scatter(1, best, False)

    def _exact_row(self, x: Tensor, num_tokens: int, hidden: Tensor) -> Tensor:
        spec, expand = self.spec, self.expand.double()
        positions = torch.arange(len(x), device=x.device)
        heads, row = x.double().split((spec.num_heads * spec.head_dim, spec.row_dim), 1)
        q_nope, q_rope = heads.unflatten(-1, (spec.num_heads, -1)).split((spec.nope_dim, spec.rope_dim), -1)
        latent, k_rope = row.split((spec.latent_dim, spec.rope_dim), -1)
        latent = latent / (latent.square().mean(-1, keepdim=True) + EPS).sqrt() * self.norm.weight.double()
        both = torch.cat((q_rope, k_rope[:, None]), 1)
        both = rotated(both, self.rope, positions, is_interleaved=spec.is_interleaved)
        k_nope, v = torch.einsum("tl,hdl->thd", latent, expand).split((spec.nope_dim, spec.v_head_dim), -1)
        scores = torch.einsum("qhd,khd->hqk", q_nope[-num_tokens:], k_nope)
        scores += torch.einsum("qhd,kd->hqk", both[-num_tokens:, :-1], both[:, -1])
        weights = (scores * spec.scale).masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
