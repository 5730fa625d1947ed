"""Paged attention in plain PyTorch.

Decode reads the cache in place, with no copy of the history and no padding: the scores are a *sampled* matrix product
(only the (query, cached key) pairs that belong together, given as a sparse pattern), and the weighted sum of the values
is an `embedding_bag` over the cached value rows. Only the scores, 1 / head_dim of the data, are padded for the softmax.
Gathering the history for a dense product costs about half as much again at batch 32 on a CPU, and would multiply what
stands in the padding by zero, which is not zero when it is NaN.

Prefill gathers the context of each row once a layer and runs `scaled_dot_product_attention`.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.interface import AttentionShape, AttentionStep
from worker.kernels.transfer import to_device

# torch warns once, at the first sparse tensor, that not all of their support is there. `sampled_addmm` is all we need.
with warnings.catch_warnings(action="ignore"):
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1))


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Flat lists over all (row, head, position in context) triples, in this order: N of them, R = rows × heads."""

    key_rows: Tensor
    """int32 [N]: row of the cache, seen as [blocks × block_size × K, D], that the triple reads."""
    starts: Tensor
    """int32 [R + 1]: first triple of each (row, head)."""
    gathered_rows: Tensor | None
    """int64 [rows × K × longest context]: the same for each (row, kv head, position), where keys must be gathered."""
    padded_shape: tuple[int, int]
    """(R, longest context)."""
    padded_index: Tensor | None
    """int64 [N]: place of each triple in the padded scores; None when all contexts are equally long."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    num_queries: int
    token_slots: Tensor
    """int64 [context]; the whole context of the row, in order."""
    mask: Tensor | None
    """[num_queries, context] of 0 and −inf, or None when the row has no prefix and plain causality does."""


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan:
    decode: DecodePlan | None
    prefill: tuple[PrefillRow, ...]


def plan_attention(step: AttentionStep, shape: AttentionShape, dtype: torch.dtype) -> TorchAttentionPlan:
    decode = _plan_decode(step, shape, dtype) if step.num_decode_rows else None
    rows = range(step.num_decode_rows, len(step.query_lens))
    return TorchAttentionPlan(decode, tuple(_plan_prefill_row(step, row, dtype) for row in rows))


def _plan_decode(step: AttentionStep, shape: AttentionShape, dtype: torch.dtype) -> DecodePlan:
    device = step.block_tables.device
    lens, heads, kv_heads = step.context_lens[: step.num_decode_rows], shape.num_heads, shape.num_kv_heads
    longest = max(lens)
    positions = torch.arange(longest, device=device)
    blocks = step.block_tables[: len(lens), positions // step.block_size]
    token_slots = blocks * step.block_size + positions % step.block_size
    by_kv_head = token_slots[:, None, :] * kv_heads + torch.arange(kv_heads, device=device)[:, None]
    key_rows = by_kv_head.repeat_interleave(heads // kv_heads, 1, output_size=heads).flatten()

    padded_index = None
    head_lens = torch.tensor(lens).repeat_interleave(heads)
    starts = functional.pad(head_lens.cumsum(0), (1, 0))
    if min(lens) != longest:
        gaps = torch.arange(len(head_lens)) * longest - starts[:-1]
        padded_index = to_device(torch.arange(int(starts[-1])) + gaps.repeat_interleave(head_lens), device)
        key_rows = key_rows.index_select(0, padded_index)
    return DecodePlan(
        key_rows=key_rows.int(),
        gathered_rows=None if _has_sampled_product(device, dtype) else by_kv_head.flatten(),
        starts=to_device(starts.int(), device),
        padded_shape=(len(lens) * heads, longest),
        padded_index=padded_index,
    )


def _has_sampled_product(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.float32


def _plan_prefill_row(step: AttentionStep, row: int, dtype: torch.dtype) -> PrefillRow:
    device = step.block_tables.device
    num_queries, context = step.query_lens[row], step.context_lens[row]
    positions = torch.arange(context, device=device)
    token_slots = step.block_tables[row, positions // step.block_size] * step.block_size + positions % step.block_size
    if num_queries == context:
        return PrefillRow(num_queries, token_slots, None)
    hidden = positions > positions[context - num_queries :, None]
    mask = torch.zeros(num_queries, context, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return PrefillRow(num_queries, token_slots, mask)


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """See `KernelBackend.attention_decode`."""
    head_dim = q.shape[-1]
    keys, values = k_cache.view(-1, head_dim), v_cache.view(-1, head_dim)
    scores = _sampled_scores(q.reshape(-1, head_dim), keys, plan, scale)
    if plan.padded_index is None:
        weights = torch.softmax(scores.view(plan.padded_shape), -1).flatten()
    else:
        padded = scores.new_full((plan.padded_shape[0] * plan.padded_shape[1],), -torch.inf)
        padded.index_copy_(0, plan.padded_index, scores)
        weights = torch.softmax(padded.view(plan.padded_shape), -1).flatten().index_select(0, plan.padded_index)
    mixed = functional.embedding_bag(
        plan.key_rows, values, plan.starts, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    return mixed.view(q.shape)


def _sampled_scores(q: Tensor, keys: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """scale × q · key of each triple: [N]; q is [R, D].

    torch has the sampled product in float32 on the CPU. Elsewhere the keys are gathered, padded to the longest context;
    whatever the padding gives is dropped here, before anything adds it up.
    """
    if plan.gathered_rows is not None:
        longest, head_dim = plan.padded_shape[1], q.shape[1]
        gathered = keys.index_select(0, plan.gathered_rows).view(-1, longest, head_dim)
        queries = q.view(len(gathered), -1, head_dim)
        scores = torch.bmm(gathered, queries.transpose(1, 2)).transpose(1, 2).flatten() * scale
        return scores if plan.padded_index is None else scores.index_select(0, plan.padded_index)
    zeros = q.new_zeros(plan.key_rows.numel())
    pattern = torch.sparse_csr_tensor(
        plan.starts, plan.key_rows, zeros, (q.shape[0], keys.shape[0]), check_invariants=False
    )
    return torch.sparse.sampled_addmm(pattern, q, keys.T, beta=0.0, alpha=scale).values()


def prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: tuple[PrefillRow, ...], scale: float) -> Tensor:
    """See `KernelBackend.attention_prefill`."""
    grouped = q.shape[1] != k_cache.shape[2]
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    out = torch.empty_like(q)
    start = 0
    for row in rows:
        end = start + row.num_queries
        k = keys.index_select(0, row.token_slots).transpose(0, 1)[None]
        v = values.index_select(0, row.token_slots).transpose(0, 1)[None]
        mixed = functional.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None], k, v,
            attn_mask=row.mask, is_causal=row.mask is None, scale=scale, enable_gqa=grouped,
        )  # fmt: skip
        out[start:end] = mixed[0].transpose(0, 1)
        start = end
    return out
