"""Attention over a paged cache through AITER's HIP, CK and assembly kernels.

The cache is in the layout that assembly decode reads: keys and values in packets of 16 bytes (x values), [blocks, K,
D / x, block_size, x] and [blocks, K, block_size / x, D, x].
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from worker.kernels.aiter import package
from worker.kernels.aiter.elementwise import norm_rows
from worker.kernels.aiter.package import Need, required
from worker.kernels.aiter.paged import StepViews, split_qkv, step_views
from worker.kernels.aiter.prefill import Prefill, Prefiller
from worker.kernels.aiter.rope import HalfTables
from worker.kernels.elementwise import RopeTable
from worker.kernels.gqa import GqaCache, GqaKernel, GqaPool, GqaSpec, QkNorm
from worker.kernels.step import Step, StepBuffers

PACKET_BYTES = 16
NEOX = 0
FUSED_WRITE = "fused_qk_norm_rope_cache_quant_shuffle"


class Decode(Protocol):
    """Attention of uniform rows over the cache."""

    def check(self, block_size: int) -> None:
        """Raises KernelBackendError where blocks of that size cannot be read."""

    def check_step(self, uniform_len: int) -> None:
        """Raises KernelBackendError where rows of that length cannot be served."""

    def __call__(self, q: Tensor, cache: GqaCache, views: StepViews, out: Tensor) -> None:
        """q and out [rows × uniform_len, H, D], both contiguous."""


@dataclass(frozen=True, slots=True)
class Metadata:
    views: StepViews
    prefill: Prefill | None


class NativeGqa(GqaKernel):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        ("aiter", "rms_norm"),
        ("aiter", "rope_cached_positions_2c_fwd_inplace"),
        ("aiter", "reshape_and_cache"),
        *Prefiller.NEEDS,
    )

    def __init__(self, spec: GqaSpec, device: torch.device, decode: Decode) -> None:
        self._spec, self._decode, self._prefiller = spec, decode, Prefiller(spec)
        self._norm = required("aiter", "rms_norm")
        self._rotate = required("aiter", "rope_cached_positions_2c_fwd_inplace")
        self._write = required("aiter", "reshape_and_cache")
        self._fused_write = _fused_write()
        self._tables = HalfTables()
        self._no_scale = torch.ones(1, dtype=torch.float32, device=device)

    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> GqaPool:
        self._decode.check(block_size)
        kv_heads, dim, x = self._spec.num_kv_heads, self._spec.head_dim, PACKET_BYTES // self._spec.dtype.itemsize
        shapes = ((kv_heads, dim // x, block_size, x), (kv_heads, block_size // x, dim, x))
        k, v = (
            torch.zeros((num_layers, num_blocks, *shape), dtype=self._spec.dtype, device=device) for shape in shapes
        )
        layers = [GqaCache(k[i], v[i]) for i in range(num_layers)]
        return GqaPool(layers, [k.transpose(0, 1), v.transpose(0, 1)])

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return (max_context_len,)

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> Metadata:
        if step.num_uniform_rows:
            self._decode.check_step(step.uniform_len)
        views = step_views(step, buffers)
        return Metadata(views, self._prefiller.prepare(views, block_size) if step.chunks else None)

    def write_qkv(
        self, qkv: Tensor, norm: QkNorm | None, rope: RopeTable | None, cache: GqaCache, metadata: Metadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split_qkv(qkv, self._spec)
        views = metadata.views
        if norm is not None and rope is not None and self._fused_write is not None and norm.q_weight.dtype == q.dtype:
            self._fused_write(
                q=q, k=k, v=v,
                num_heads_q=self._spec.num_heads, num_heads_k=k.shape[1], num_heads_v=v.shape[1],
                head_dim=self._spec.head_dim, eps=norm.eps, qw=norm.q_weight, kw=norm.k_weight,
                cos_sin_cache=self._tables.of(rope).both, is_neox_style=True, pos_ids=views.positions,
                k_cache=cache.k, v_cache=cache.v, slot_mapping=views.token_slots,
                kv_cache_dtype="auto", k_scale=self._no_scale, v_scale=self._no_scale,
            )  # fmt: skip
            return q, k, v
        if norm is not None:
            q, k = (norm_rows(self._norm, x, w, norm.eps) for x, w in ((q, norm.q_weight), (k, norm.k_weight)))
        if rope is not None:
            table = self._tables.of(rope)
            # [1, tokens, heads, D], angles [positions, 1, 1, D / 2]
            self._rotate(
                q[None], k[None], table.cos[:, None, None], table.sin[:, None, None], views.positions[None],
                NEOX, reuse_freqs_front_part=True, nope_first=False,
            )  # fmt: skip
        self._write(k, v, cache.k, cache.v, views.token_slots, "auto", asm_layout=True)
        return q, k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: GqaCache, metadata: Metadata, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        num_uniform = metadata.views.step.num_uniform_tokens
        if num_uniform:
            # The kernels are told the stride of q alone, and write with it.
            self._decode(q[:num_uniform].contiguous(), cache, metadata.views, out[:num_uniform])
        if metadata.prefill is not None:
            chunks = slice(num_uniform, None)
            out[chunks] = self._prefiller(q[chunks], k[chunks], v[chunks], cache, metadata.prefill)
        return out.flatten(1)


def _fused_write() -> Callable[..., Any] | None:
    """Norms, rotation and cache write in one. Some releases take q, k and v as one tensor: those are compiled at their
    first call and show no parameters. There the three are done one after the other."""
    found = package.operation("aiter", FUSED_WRITE)
    return found if found is not None and "q" in inspect.signature(found).parameters else None
