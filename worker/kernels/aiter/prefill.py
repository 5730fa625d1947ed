"""Attention of a step's chunks through flash attention over rows of any length, dense."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from worker.kernels.aiter.package import Need, required
from worker.kernels.aiter.paged import StepViews
from worker.kernels.gqa import GqaCache, GqaSpec
from worker.kernels.transfer import to_device


@dataclass(frozen=True, slots=True)
class Prefill:
    query_starts: Tensor
    """int32 [C + 1]: of the chunks, the first at 0."""
    key_starts: Tensor
    longest_query: int
    longest_context: int
    blocks: Tensor | None
    """int64 [sum of contexts]: block of each token of each context; None where no chunk has a prefix."""
    offsets: Tensor | None
    """int64 [sum of contexts]: its place in the block."""


class Prefiller:
    """Reads the keys and values of this step where that is all there is. Contexts with a cached prefix are gathered
    from the cache first, for all chunks: flash attention takes one dense list."""

    NEEDS: ClassVar[tuple[Need, ...]] = (("aiter", "flash_attn_varlen_func"),)

    def __init__(self, spec: GqaSpec) -> None:
        self._spec = spec
        self._attention = required("aiter", "flash_attn_varlen_func")

    def prepare(self, views: StepViews, block_size: int) -> Prefill:
        chunks, device = views.step.chunks, views.positions.device
        query_lens, context_lens = [c.num_tokens for c in chunks], [c.context_len for c in chunks]
        blocks = offsets = None
        if query_lens != context_lens:
            tables = views.block_tables[views.step.num_uniform_rows :].long()
            lens = to_device(torch.tensor(context_lens), device)
            rows = torch.arange(len(chunks), device=device).repeat_interleave(lens, output_size=sum(context_lens))
            places = torch.arange(sum(context_lens), device=device) - (lens.cumsum(0) - lens)[rows]
            blocks, offsets = tables[rows, places // block_size], places % block_size
        return Prefill(
            query_starts=_starts(query_lens, device),
            key_starts=_starts(context_lens, device),
            longest_query=max(query_lens),
            longest_context=max(context_lens),
            blocks=blocks,
            offsets=offsets,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: GqaCache, prefill: Prefill) -> Tensor:
        """q [T, H, D], k and v [T, K, D] of the chunks → [T, H, D]."""
        if prefill.blocks is not None:
            assert prefill.offsets is not None
            x = cache.k.shape[-1]
            k = cache.k[prefill.blocks, :, :, prefill.offsets].flatten(2)
            v = cache.v[prefill.blocks, :, prefill.offsets // x, :, prefill.offsets % x]
        out: Tensor = self._attention(
            q, k, v, prefill.query_starts, prefill.key_starts, prefill.longest_query, prefill.longest_context,
            softmax_scale=self._spec.scale, causal=True,
        )  # fmt: skip
        return out


def _starts(lens: list[int], device: torch.device) -> Tensor:
    """int32 [n + 1]"""
    return to_device(torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32), device)
