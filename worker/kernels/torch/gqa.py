"""Attention over a paged cache of K and V per head, in plain torch.

Decode reads the cache in place on a CPU, with no copy of the history and no padding: the scores are a *sampled* matrix
product (only the (query, cached key) pairs that belong together, given as a sparse pattern), and the weighted sum of
the values is an `embedding_bag` over the cached value rows. Only the scores, 1 / head_dim of the data, are padded for
the softmax. Gathering the history for a dense product costs about half as much again at batch 32 on a CPU.

Elsewhere the lengths of rows that decode are device facts, so the history is gathered up to the longest context, and
what lies past a row's own is taken from its first token in place of whatever stands there, which may be NaN.

Chunks run `scaled_dot_product_attention` one by one: over their own k and v where they have no prefix, else over the
context gathered from the cache.
"""

import warnings

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.elementwise import RopeTable
from worker.kernels.gqa import GqaCache, GqaKernel, GqaPool, GqaSpec, QkNorm
from worker.kernels.step import Step, StepBuffers
from worker.kernels.torch.elementwise import rms_norm, rotate
from worker.kernels.torch.fp8 import FP8, read_rows, to_fp8, write_rows
from worker.kernels.torch.gqa_rows import ChunkRow, ExactRows, Metadata, PaddedRows, chunk_row, exact_rows, padded_rows

# torch warns once, at the first sparse tensor, that not all of their support is there. `sampled_addmm` is all we need.
with warnings.catch_warnings(action="ignore"):
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1))


class TorchGqa(GqaKernel):
    """The cache is [layers, blocks + spare, block_size, K, D], K and V apart."""

    def __init__(self, spec: GqaSpec, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype`: of activations."""
        self._spec, self._dtype = spec, dtype
        self._is_read_in_place = device.type == "cpu" and spec.dtype == dtype
        self._has_sampled_product = device.type == "cpu" and spec.dtype == torch.float32

    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> GqaPool:
        shape = (num_layers, num_blocks, block_size, self._spec.num_kv_heads)
        k, v = (
            torch.empty((*shape, dim), dtype=self._spec.dtype, device=device)
            for dim in (self._spec.head_dim, self._spec.value_dim)
        )
        layers = [GqaCache(k[i], v[i]) for i in range(num_layers)]
        return GqaPool(layers, [k.transpose(0, 1), v.transpose(0, 1)])

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> Metadata:
        write_slots = buffers.token_slots[: step.num_tokens]
        if step.num_padding_rows:
            write_slots = torch.where(write_slots < 0, buffers.spare_block * block_size, write_slots)
        tables = buffers.block_tables[: step.num_rows, : -(-step.max_context_len // block_size)]
        uniform: ExactRows | PaddedRows | None = None
        if step.num_uniform_rows:
            if self._is_read_in_place and step.uniform_len == 1:
                gathers_keys = not self._has_sampled_product
                uniform = exact_rows(self._spec, step, buffers, tables, block_size, gathers_keys=gathers_keys)
            else:
                uniform = padded_rows(self._spec, step, buffers, tables, block_size)
        chunks = tuple(
            chunk_row(self._spec, self._dtype, chunk, tables[step.num_uniform_rows + i], block_size)
            for i, chunk in enumerate(step.chunks)
        )
        return Metadata(step, buffers.positions[: step.num_tokens], write_slots, uniform, chunks)

    def write_qkv(
        self, qkv: Tensor, norm: QkNorm | None, rope: RopeTable | None, cache: GqaCache, metadata: Metadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, head_dim = self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim
        flat, values = qkv.split(((heads + kv_heads) * head_dim, kv_heads * self._spec.value_dim), -1)
        qk, v = flat.unflatten(-1, (-1, head_dim)), values.unflatten(-1, (kv_heads, -1))
        if norm is not None:
            q = rms_norm(qk[:, :heads], norm.q_weight, norm.eps)
            k = rms_norm(qk[:, heads:], norm.k_weight, norm.eps)
            qk = torch.cat((q, k), 1)
        if rope is not None:
            qk = rotate(qk, *metadata.rope_rows(rope))
        q, k = qk[:, :heads], qk[:, heads:]
        if cache.k.dtype == FP8:
            cached_k, cached_v = to_fp8(k, cache.k_scale), to_fp8(v, cache.v_scale)
            k, v = cached_k.to(q.dtype) * cache.k_scale, cached_v.to(q.dtype) * cache.v_scale
        else:
            cached_k, cached_v = k, v
        write_rows(cache.k.flatten(0, 1), metadata.write_slots, cached_k)
        write_rows(cache.v.flatten(0, 1), metadata.write_slots, cached_v)
        return q, k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: GqaCache, metadata: Metadata, sinks: Tensor | None = None
    ) -> Tensor:
        split, parts = metadata.step.num_uniform_tokens, []
        if isinstance(metadata.uniform, ExactRows):
            parts.append(self._attend_exact(q[:split], cache, metadata.uniform, sinks))
        elif metadata.uniform is not None:
            parts.append(self._attend_padded(q[:split], cache, metadata.uniform, sinks))
        at = split
        for chunk in metadata.chunks:
            end = at + chunk.num_tokens
            parts.append(self._attend_chunk(q[at:end], k[at:end], v[at:end], cache, chunk, sinks))
            at = end
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed.flatten(1)

    def _attend_exact(self, q: Tensor, cache: GqaCache, rows: ExactRows, sinks: Tensor | None) -> Tensor:
        head_dim = q.shape[-1]
        keys, values = cache.k.view(-1, head_dim), cache.v.view(-1, self._spec.value_dim)
        scores = self._sampled_scores(q.reshape(-1, head_dim), keys, rows)
        if rows.padded_index is None:
            weights = _softmax(scores.view(rows.padded_shape), sinks).flatten()
        else:
            padded = scores.new_full((rows.padded_shape[0] * rows.padded_shape[1],), -torch.inf)
            padded.index_copy_(0, rows.padded_index, scores)
            weights = _softmax(padded.view(rows.padded_shape), sinks).flatten().index_select(0, rows.padded_index)
        mixed = functional.embedding_bag(
            rows.key_rows, values, rows.starts, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        return mixed.view(len(q), -1, self._spec.value_dim)

    def _sampled_scores(self, q: Tensor, keys: Tensor, rows: ExactRows) -> Tensor:
        """scale × q · key of each triple: [N]; q is [Q, D]. torch has the sampled product in float32 alone."""
        if rows.gathered_rows is not None:
            longest, head_dim = rows.padded_shape[1], q.shape[1]
            gathered = keys.index_select(0, rows.gathered_rows).view(-1, longest, head_dim)
            queries = q.view(len(gathered), -1, head_dim)
            scores = torch.bmm(gathered, queries.transpose(1, 2)).transpose(1, 2).flatten() * self._spec.scale
            return scores if rows.padded_index is None else scores.index_select(0, rows.padded_index)
        zeros = q.new_zeros(rows.key_rows.numel())
        pattern = torch.sparse_csr_tensor(
            rows.starts, rows.key_rows, zeros, (q.shape[0], keys.shape[0]), check_invariants=False
        )
        return torch.sparse.sampled_addmm(pattern, q, keys.T, beta=0.0, alpha=self._spec.scale).values()

    def _attend_padded(self, q: Tensor, cache: GqaCache, rows: PaddedRows, sinks: Tensor | None = None) -> Tensor:
        """Products spelt out: with a mask, torch's fused attention takes several times as long for so few queries."""
        num_rows, _, length, _, longest = rows.hidden.shape
        kv_heads, head_dim = self._spec.num_kv_heads, self._spec.head_dim
        k, v = (
            read_rows(tensor.view(-1, dim), rows.key_rows, scale, self._dtype).view(-1, longest, dim)
            for tensor, scale, dim in (
                (cache.k, cache.k_scale, head_dim),
                (cache.v, cache.v_scale, self._spec.value_dim),
            )
        )
        by_kv_head = q.reshape(num_rows, length, kv_heads, -1, head_dim).transpose(1, 2)
        scores = torch.bmm(by_kv_head.reshape(num_rows * kv_heads, -1, head_dim), k.transpose(1, 2))
        scores = scores.float().mul_(self._spec.scale).view(num_rows, kv_heads, length, -1, longest)
        scores = scores.masked_fill_(rows.hidden, -torch.inf).transpose(2, 3)
        by_head = None if sinks is None else sinks.view(kv_heads, -1, 1)
        weights = _softmax(scores, by_head).transpose(2, 3).to(v.dtype)
        mixed = torch.bmm(weights.reshape(num_rows * kv_heads, -1, longest), v)
        mixed = mixed.view(num_rows, kv_heads, length, -1, self._spec.value_dim)
        return mixed.transpose(1, 2).reshape(len(q), -1, self._spec.value_dim)

    def _attend_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, cache: GqaCache, chunk: ChunkRow, sinks: Tensor | None
    ) -> Tensor:
        if chunk.token_slots is not None:
            k = read_rows(cache.k.flatten(0, 1), chunk.token_slots, cache.k_scale, self._dtype)
            v = read_rows(cache.v.flatten(0, 1), chunk.token_slots, cache.v_scale, self._dtype)
        mask = chunk.mask
        if sinks is not None and mask is not None:
            # One more key and value of zeros, whose score is the sink.
            k, v = (functional.pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (k, v))
            column = sinks.to(mask.dtype)[:, None, None].expand(-1, chunk.num_tokens, 1)
            mask = torch.cat((mask.expand(len(sinks), -1, -1), column), -1)
        mixed = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
            attn_mask=mask, is_causal=mask is None, scale=self._spec.scale, enable_gqa=self._is_grouped,
        )  # fmt: skip
        return mixed[0].transpose(0, 1)

    @property
    def _is_grouped(self) -> bool:
        return self._spec.num_heads != self._spec.num_kv_heads


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension; sinks [H], repeated along the first, or as wide as the scores but for the last."""
    if sinks is None:
        return scores.softmax(-1)
    if sinks.dim() == 1:
        sinks = sinks.repeat(scores.shape[0] // len(sinks))
    column = sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def supports_gqa(spec: GqaSpec, device: torch.device, dtype: torch.dtype) -> bool:
    return spec.dtype in (dtype, FP8)
