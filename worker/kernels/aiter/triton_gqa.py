"""Attention over a paged cache through AITER's Triton kernels: one launch writes, one serves all rows of a step."""

from typing import ClassVar

import torch
from torch import Tensor

from worker.kernels.aiter.elementwise import TRITON_RMS_NORM, norm_rows
from worker.kernels.aiter.package import Need, required
from worker.kernels.aiter.paged import StepViews, split_qkv, step_views
from worker.kernels.aiter.rope import HalfTable, HalfTables
from worker.kernels.elementwise import RopeTable
from worker.kernels.gqa import GqaCache, GqaKernel, GqaPool, GqaSpec, QkNorm, is_plain
from worker.kernels.operation import KernelBackendError
from worker.kernels.step import Step, StepBuffers

UNIFIED_ATTENTION = "aiter.ops.triton.unified_attention"
FUSED_CACHE = "aiter.ops.triton.fused_kv_cache"
SMALLEST_BLOCK = 16
"""A product of tiles has at least so many keys."""


class TritonGqa(GqaKernel):
    """The cache is [layers, blocks + spare, block_size, K, D], K and V apart: the only layout that
    `unified_attention` reads in every release."""

    NEEDS: ClassVar[tuple[Need, ...]] = (
        (TRITON_RMS_NORM, "rms_norm"),
        (FUSED_CACHE, "fused_qk_rope_reshape_and_cache"),
        (UNIFIED_ATTENTION, "unified_attention"),
    )

    @staticmethod
    def suits(spec: GqaSpec) -> bool:
        """Tiles are as wide as a head; a cache of float8 was never tried."""
        is_tile = spec.head_dim & (spec.head_dim - 1) == 0 and 16 <= spec.head_dim <= 256
        return spec.dtype.itemsize == 2 and is_plain(spec) and is_tile

    def __init__(self, spec: GqaSpec, device: torch.device) -> None:
        self._spec = spec
        self._norm = required(TRITON_RMS_NORM, "rms_norm")
        self._rotate_and_write = required(FUSED_CACHE, "fused_qk_rope_reshape_and_cache")
        self._attention = required(UNIFIED_ATTENTION, "unified_attention")
        # How many tokens are seen to the left and to the right of one, −1 for all.
        self._window = (-1, -1) if spec.window is None else (spec.window - 1, 0)
        self._tables = HalfTables()
        # The kernel that writes rotates, too. Where a layer has no positions, all are rotated by those of nothing.
        half = torch.zeros(1, spec.head_dim // 2, dtype=spec.dtype, device=device)
        self._unrotated = RopeTable(torch.cat((half + 1, half + 1), 1), torch.cat((half, half), 1))

    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> GqaPool:
        if block_size < SMALLEST_BLOCK or block_size & (block_size - 1):
            raise KernelBackendError(
                f"AITER's Triton attention has blocks of 16, 32, 64, ... tokens, not {block_size}: "
                "use another --block-size, or --kernel-backend torch"
            )
        shape = (num_layers, num_blocks, block_size, self._spec.num_kv_heads, self._spec.head_dim)
        k, v = (torch.zeros(shape, dtype=self._spec.dtype, device=device) for _ in range(2))
        layers = [GqaCache(k[i], v[i]) for i in range(num_layers)]
        return GqaPool(layers, [k.transpose(0, 1), v.transpose(0, 1)])

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return (max_context_len,)

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> StepViews:
        return step_views(step, buffers)

    def write_qkv(
        self, qkv: Tensor, norm: QkNorm | None, rope: RopeTable | None, cache: GqaCache, metadata: StepViews
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split_qkv(qkv, self._spec)
        if norm is not None:
            q, k = (norm_rows(self._norm, x, w, norm.eps) for x, w in ((q, norm.q_weight), (k, norm.k_weight)))
        table, positions = self._angles(rope, metadata)
        q, k, *_ = self._rotate_and_write(
            q, k, v, cache.k, cache.v, metadata.token_slots, positions, table.cos, table.sin, None, None,
            is_neox=True, flash_layout=True, output_zeros=False,
        )  # fmt: skip
        return q, k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: GqaCache, metadata: StepViews, sinks: Tensor | None = None
    ) -> Tensor:
        step = metadata.step
        lens = [chunk.num_tokens for chunk in step.chunks]
        if step.num_uniform_rows:
            lens.append(step.uniform_len)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._attention(
            q, cache.k, cache.v, out, metadata.query_starts, max(lens), metadata.context_lens, step.max_context_len,
            self._spec.scale, True, self._window, metadata.block_tables, 0.0, None, None, None, sinks=sinks,
        )  # fmt: skip
        return out.flatten(1)

    def _angles(self, rope: RopeTable | None, metadata: StepViews) -> tuple[HalfTable, Tensor]:
        if rope is None:
            return self._tables.of(self._unrotated), torch.zeros_like(metadata.positions)
        return self._tables.of(rope), metadata.positions
