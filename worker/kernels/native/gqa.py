"""Attention over the paged cache in the library: what it writes and reads, and the view of a step."""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from worker.kernels.elementwise import RopeTable
from worker.kernels.gqa import INT8_TOKENS, SCALE_BYTES, GqaCache, GqaKernel, GqaPool, GqaSpec, QkNorm, is_plain
from worker.kernels.native.library import Layer, Model, StepView, engine, obstacle, pointer
from worker.kernels.native.memory import mapped
from worker.kernels.step import Step, StepBuffers

PAST_THE_END = 16
"""Entries behind the keys: the last of them are read a vector at a time."""
WIDTHS = 16
"""Of the widest vector: heads are whole vectors."""
CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
"""In the order of `Kept` (attention.h)."""


class StepMetadata(NamedTuple):
    view: StepView
    num_tokens: int
    block_size: int
    buffers: StepBuffers
    """What the view points into."""


class NativeGqa(GqaKernel):
    """Keys are [blocks + spare, layers, K, D, block_size], values [blocks + spare, layers, K,
    block_size, D]: blocks first, so that those in use lie together on large pages. Of bfloat16 the library may have
    numbers of a head in a block in another order (pairs.h); of int8 it has them in an order of its own, with their
    scales behind them (quads.h): both are [blocks + spare, layers, K, (D + 4) × block_size]."""

    def __init__(self, spec: GqaSpec) -> None:
        self._spec = spec
        self._engine = engine()
        self._view = StepView()
        self._viewed: StepBuffers | None = None

    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> GqaPool:
        head_dim, dtype = self._spec.head_dim, self._spec.dtype
        of_keys: tuple[int, ...] = (head_dim, block_size)
        of_values: tuple[int, ...] = (block_size, head_dim)
        if dtype == torch.int8:
            assert block_size % INT8_TOKENS == 0
            of_keys = of_values = ((head_dim + SCALE_BYTES) * block_size,)
        shape = (num_blocks, num_layers, self._spec.num_kv_heads)
        size = prod((*shape, *of_keys))
        k, v = (
            mapped(dtype.itemsize * (size + PAST_THE_END)).view(dtype)[:size].view(*shape, *of_head)
            for of_head in (of_keys, of_values)
        )
        return GqaPool([GqaCache(k[:, i], v[:, i]) for i in range(num_layers)], [k, v])

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        """A step reads no more than its rows have, whatever they might have."""
        return (max_context_len,)

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> StepMetadata:
        if buffers is not self._viewed:
            self._view, self._viewed = _view_of(buffers), buffers
        self._view.num_tokens, self._view.num_rows = step.num_tokens, step.num_rows
        return StepMetadata(self._view, step.num_tokens, block_size, buffers)

    def write_qkv(
        self, qkv: Tensor, norm: QkNorm | None, rope: RopeTable | None, cache: GqaCache, metadata: StepMetadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        layer = Layer()
        point_at_attention(layer, norm, rope, cache)
        model = attention_model(self._spec, norm, cache, metadata.block_size)
        self._engine.write_qkv(model, layer, metadata.view, qkv)
        heads, kv_heads = self._spec.num_heads, self._spec.num_kv_heads
        q, k, v = qkv.unflatten(-1, (-1, self._spec.head_dim)).split((heads, kv_heads, kv_heads), 1)
        return q, k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: GqaCache, metadata: StepMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        layer = Layer()
        point_at_attention(layer, None, None, cache)
        out = torch.empty(metadata.num_tokens, self._spec.num_heads * self._spec.head_dim)
        self._engine.attend(attention_model(self._spec, None, cache, metadata.block_size), layer, metadata.view, q, out)
        return out


def _view_of(buffers: StepBuffers) -> StepView:
    """Of no tokens; the buffers do not move."""
    return StepView(
        0, 0, buffers.block_tables.stride(0), pointer(buffers.positions), pointer(buffers.token_slots),
        pointer(buffers.query_starts), pointer(buffers.context_lens), pointer(buffers.block_tables),
    )  # fmt: skip


def attention_model(spec: GqaSpec, norm: QkNorm | None, cache: GqaCache, block_size: int = 0) -> Model:
    """The part that attention needs; the size of blocks is that of a step."""
    return Model(
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        kept=CACHE_DTYPES.index(spec.dtype),
        block_stride=cache.k.stride(0),
        scale=spec.scale,
        head_eps=0.0 if norm is None else norm.eps,
    )


def point_at_attention(layer: Layer, norm: QkNorm | None, rope: RopeTable | None, cache: GqaCache) -> None:
    layer.k, layer.v = cache.k.data_ptr(), cache.v.data_ptr()
    layer.k_scale, layer.v_scale = cache.k_scale, cache.v_scale
    if norm is not None:
        layer.q_norm, layer.k_norm = pointer(norm.q_weight), pointer(norm.k_weight)
    if rope is not None:
        layer.cos, layer.sin = pointer(rope.cos), pointer(rope.sin)


def supports_gqa(spec: GqaSpec, device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and spec.dtype in CACHE_DTYPES
        and spec.window is None
        and not spec.has_sinks
        and is_plain(spec)
        and spec.head_dim % WIDTHS == 0
        and obstacle() is None
    )
