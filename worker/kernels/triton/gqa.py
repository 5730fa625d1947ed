"""Attention over a paged cache of K and V per head, in Triton; long prompts through torch's cuDNN attention."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from worker.kernels.elementwise import RopeTable
from worker.kernels.gqa import GqaCache, GqaKernel, GqaPool, GqaSpec, QkNorm
from worker.kernels.step import Step, StepBuffers
from worker.kernels.torch.fp8 import FP8
from worker.kernels.triton.gqa_attend import LOG2_E, reduce_kernel
from worker.kernels.triton.gqa_chunks import attend_chunks_kernel
from worker.kernels.triton.gqa_lone import KEYS as LONE_KEYS
from worker.kernels.triton.gqa_lone import PARTS as LONE_PARTS
from worker.kernels.triton.gqa_lone import LoneTile, attend_lone_kernel, sum_lone_kernel
from worker.kernels.triton.gqa_parts import Dense, Paged, parts_of
from worker.kernels.triton.gqa_rows import attend_rows_kernel
from worker.kernels.triton.gqa_splits import RESIDENT, Splits, chunk_splits, deal_splits
from worker.kernels.triton.gqa_steps import FEW_ROWS, all_steps, graph_contexts, is_lone
from worker.kernels.triton.gqa_write import HEADS, write_qkv_kernel
from worker.kernels.triton.launch import Launches
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import LINE_BYTES, launch_options

Parts = tuple[Tensor, Tensor, Tensor]
"""Of splits: values mixed, float32; maximum and sum of the softmax."""

LONG_DENSE = 2048
"""Tokens of a prompt from which cuDNN is a tenth faster if queries are not beside keys and values in memory."""
FEW_SPLITS, MANY_SPLITS = 8, 32
"""Whose parts `reduce_kernel` adds up at a time, by one warp or by four."""
SUMMED = 4096
"""Numbers of parts that a program of several rows adds up at a time."""
DENSE_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


@dataclass(frozen=True, slots=True)
class Metadata:
    step: Step
    buffers: StepBuffers
    block_size: int
    splits: Splits | None
    """Of the uniform rows, if they are attended to as such."""
    arrived: Tensor | None
    """int32 [uniform rows × K], zeros before and behind each layer: programs of a row that have put down their part, of
    which the last one adds them up. None where rows have one part, and for a row alone, whose parts are left to a
    kernel of their own."""
    parts: tuple[Dense | Paged, ...]
    """Of the other rows."""
    launches: Launches

    @property
    def longest_dense(self) -> int:
        """Tokens of the longest beginning of a prompt."""
        return max((part.length for part in self.parts if isinstance(part, Dense)), default=0)


@dataclass(frozen=True, slots=True)
class Tile:
    queries: int
    """Tokens × heads of a group, and padding."""
    tokens: int
    keys: int
    num_stages: int
    num_warps: int


class TritonGqa(GqaKernel):
    """The cache is [layers, blocks + spare, K, block_size, D], K and V apart."""

    def __init__(self, spec: GqaSpec, machine: Machine, dtype: torch.dtype) -> None:
        """`dtype`: of activations."""
        self._spec, self._machine, self._dtype = spec, machine, dtype
        self._group = spec.num_heads // spec.num_kv_heads
        self._dim = max(16, triton.next_power_of_2(spec.head_dim))
        self._width = max(16, triton.next_power_of_2(spec.value_dim))
        self._rotary_dim = spec.rotary_dim or spec.head_dim
        self._row_bytes = self._dim * spec.dtype.itemsize
        self._num_lines = max(1, self._row_bytes // LINE_BYTES.value)
        self._chunk_tile = self._tile_of_chunks()
        is_plain = spec.window is None and not spec.has_sinks and spec.value_dim == spec.head_dim
        self._no_arrivals: Tensor | None = None
        """Zeros that steps share in turn, for as many rows as are usually split. They never move: graphs use them."""
        self._has_dense = is_plain and spec.head_dim <= 128 and spec.head_dim % 8 == 0 and dtype.itemsize == 2

    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> GqaPool:
        shape = (num_layers, num_blocks, self._spec.num_kv_heads, block_size)
        k, v = (
            torch.empty((*shape, dim), dtype=self._spec.dtype, device=device)
            for dim in (self._spec.head_dim, self._spec.value_dim)
        )
        layers = [GqaCache(k[i], v[i]) for i in range(num_layers)]
        if self._no_arrivals is None:
            self._no_arrivals = torch.zeros(RESIDENT * self._machine.num_sms // 2, dtype=torch.int32, device=device)
        return GqaPool(layers, [k.transpose(0, 1), v.transpose(0, 1)])

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return graph_contexts(self._spec, self._machine, self._dtype, num_rows, max_context_len)

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterator[Step]:
        return all_steps(self._spec, self._machine, self._dtype, max_rows, max_tokens, max_context_len)

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> Metadata:
        num_rows, tokens = step.num_uniform_rows, step.uniform_len
        parts = tuple(parts_of(step, has_dense=self._has_dense))
        splits = arrived = None
        if num_rows and tokens * self._group > self._chunk_tile.queries:
            # Too wide for one tile a row: they are attended to as chunks.
            parts = (Paged(0, num_rows * tokens, 0, num_rows, step.max_context_len), *parts)
        elif num_rows:
            splits = deal_splits(
                self._machine, self._spec.num_kv_heads, buffers.context_lens[:num_rows], tokens, step.max_context_len,
                self._spec.window,
            )  # fmt: skip
            if splits.most > 1 and (num_rows > 1 or splits.usual == 1):
                arrived = self._arrivals(num_rows * self._spec.num_kv_heads, buffers.context_lens.device)
        return Metadata(step, buffers, block_size, splits, arrived, parts, Launches())

    def _arrivals(self, size: int, device: torch.device) -> Tensor:
        """Zeros. Among many rows a launch more, which clears them, does not count."""
        if self._no_arrivals is not None and size <= len(self._no_arrivals):
            return self._no_arrivals[:size]
        return torch.zeros(size, dtype=torch.int32, device=device)

    def write_qkv(
        self, qkv: Tensor, norm: QkNorm | None, rope: RopeTable | None, cache: GqaCache, metadata: Metadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec, buffers, num_tokens = self._spec, metadata.buffers, len(qkv)
        shapes = (
            (spec.num_heads, spec.head_dim),
            (spec.num_kv_heads, spec.head_dim),
            (spec.num_kv_heads, spec.value_dim),
        )
        half, rest = self._rotary_dim // 2, spec.head_dim - self._rotary_dim
        overlaps = self._machine.overlaps(num_tokens)
        is_apart = metadata.longest_dense >= LONG_DENSE
        if is_apart:
            q, k, v = (qkv.new_empty(num_tokens, *shape) for shape in shapes)
        else:
            parts = qkv.split([count * dim for count, dim in shapes], 1)
            q, k, v = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
        metadata.launches(
            write_qkv_kernel, (num_tokens, triton.cdiv(spec.num_heads + 2 * spec.num_kv_heads, HEADS)),
            qkv, q, k, v, *((norm.q_weight, norm.k_weight) if norm is not None else (qkv, qkv)),
            *((rope.cos, rope.sin) if rope is not None else (qkv, qkv)),
            buffers.positions, buffers.token_slots, cache.k, cache.v, cache.k_scale, cache.v_scale,
            norm.eps if norm is not None else 0.0,
            qkv.stride(0), spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, half,
            triton.next_power_of_2(half), triton.next_power_of_2(rest) if rest else 0, metadata.block_size, HEADS,
            norm is not None, rope is not None, spec.dtype == FP8, is_apart, overlaps,
            num_warps=4, **launch_options(overlaps),
        )  # fmt: skip
        return q, k, v

    def write_and_attend(
        self, qkv: Tensor, norm: QkNorm | None, rope: RopeTable | None, cache: GqaCache, metadata: Metadata,
        sinks: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Of a row that is alone, and not long."""
        if not is_lone(self._spec, self._dtype, metadata.step):
            return None
        spec, buffers, overlaps = self._spec, metadata.buffers, self._machine.can_overlap
        tile = LoneTile.of(self._dim, self._dtype.itemsize)
        out, parts = qkv.new_empty(1, spec.num_heads * spec.head_dim), self._new_parts(qkv, LONE_PARTS)
        attend_lone_kernel[(LONE_PARTS, spec.num_heads)](
            qkv, *((norm.q_weight, norm.k_weight) if norm is not None else (qkv, qkv)),
            *((rope.cos, rope.sin) if rope is not None else (qkv, qkv)),
            buffers.positions, buffers.token_slots, cache.k, cache.v, *parts, buffers.context_lens,
            buffers.block_tables, norm.eps if norm is not None else 0.0, spec.scale * LOG2_E.value,
            spec.num_kv_heads, self._group, spec.head_dim, self._dim, self._rotary_dim // 2, metadata.block_size,
            LONE_KEYS, tile.beside, spec.window or 0, norm is not None, rope is not None, overlaps,
            num_warps=1, **launch_options(overlaps),
        )  # fmt: skip
        sum_lone_kernel[(spec.num_heads, triton.cdiv(spec.head_dim, tile.slice))](
            sinks, out, *parts, buffers.context_lens, spec.num_heads, spec.head_dim, tile.slice, LONE_KEYS, LONE_PARTS,
            spec.window or 0, sinks is not None, overlaps, num_warps=1, **launch_options(overlaps),
        )  # fmt: skip
        return out

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: GqaCache, metadata: Metadata, sinks: Tensor | None = None
    ) -> Tensor:
        if metadata.splits is None and len(metadata.parts) == 1 and isinstance(metadata.parts[0], Dense):
            return self._attend_dense(q, k, v, metadata.parts[0].num_rows)
        out = q.new_empty(len(q), self._spec.num_heads * self._spec.value_dim)
        if metadata.splits is not None:
            self._attend_rows(q, cache, metadata, metadata.splits, sinks, out)
        for part in metadata.parts:
            if isinstance(part, Paged):
                self._attend_chunks(q, cache, metadata, sinks, out, part)
            else:
                at = slice(part.start, part.end)
                out[at].copy_(self._attend_dense(q[at], k[at], v[at], part.num_rows))
        return out

    def _attend_dense(self, q: Tensor, k: Tensor, v: Tensor, num_rows: int) -> Tensor:
        """[T, H, D] of so many prompts → [T, H × D]"""
        q_rows, k_rows, v_rows = (x.unflatten(0, (num_rows, -1)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(DENSE_BACKENDS, set_priority=True):
            mixed = scaled_dot_product_attention(
                q_rows, k_rows, v_rows, is_causal=True, scale=self._spec.scale, enable_gqa=self._group > 1
            )
        return mixed.transpose(1, 2).reshape(len(q), -1)

    def _attend_rows(
        self, q: Tensor, cache: GqaCache, metadata: Metadata, splits: Splits, sinks: Tensor | None, out: Tensor
    ) -> None:
        """The uniform ones."""
        spec, buffers, step, overlaps = self._spec, metadata.buffers, metadata.step, self._machine.can_overlap
        num_rows, tokens = step.num_uniform_rows, step.uniform_len
        num_programs, is_split = num_rows * splits.usual + splits.num_extra, splits.most > 1
        parts = self._new_parts(q, num_programs * tokens if is_split else 1)
        tile = self._tile_of_rows(num_rows, tokens)
        fewest = triton.next_power_of_2(tokens * self._group)
        is_left = is_split and metadata.arrived is None
        summed = 0 if is_left else min(splits.most, max(1, SUMMED // (fewest * self._width)))
        metadata.launches(
            attend_rows_kernel, (num_programs, spec.num_kv_heads),
            q, cache.k, cache.v, sinks, out, *parts, metadata.arrived, buffers.context_lens, buffers.block_tables,
            splits.by_row, splits.first_extra, splits.extra_rows,
            spec.scale * LOG2_E.value * cache.k_scale, cache.v_scale, q.stride(0), buffers.block_tables.stride(0),
            num_rows, splits.usual,
            spec.num_kv_heads, self._group, spec.head_dim, self._dim, spec.value_dim, self._width,
            metadata.block_size, tile.queries, fewest, tokens, tile.keys, tile.num_stages, summed,
            spec.window or 0, sinks is not None, is_split, splits.num_extra > 0, self._num_lines, num_rows == 1,
            overlaps, num_warps=tile.num_warps, **launch_options(overlaps),
        )  # fmt: skip
        if is_left:
            self._reduce(tokens, metadata, sinks, out, parts, splits, tokens, tile.keys)

    def _attend_chunks(
        self, q: Tensor, cache: GqaCache, metadata: Metadata, sinks: Tensor | None, out: Tensor, rows: Paged
    ) -> None:
        """In large steps the kernels overlap with none before them, and do no harm."""
        spec, buffers, tile, overlaps = self._spec, metadata.buffers, self._chunk_tile, self._machine.can_overlap
        # As many tiles as the rows can have: each begins one of its own.
        num_tiles = rows.num_tokens // tile.tokens + rows.num_rows
        splits = chunk_splits(self._machine, num_tiles * spec.num_kv_heads, rows.longest)
        parts = self._new_parts(q, rows.num_tokens * splits.usual if splits.usual > 1 else 1)
        metadata.launches(
            attend_chunks_kernel, (num_tiles, spec.num_kv_heads, splits.usual),
            q, cache.k, cache.v, sinks, out, *parts, buffers.query_starts, buffers.context_lens, buffers.block_tables,
            spec.scale * LOG2_E.value * cache.k_scale, cache.v_scale, q.stride(0), buffers.block_tables.stride(0),
            rows.first_row, rows.num_rows, rows.start, rows.num_tokens, rows.skipped, splits.usual,
            spec.num_kv_heads, self._group, spec.head_dim, self._dim, spec.value_dim, self._width,
            metadata.block_size, tile.queries, tile.tokens, tile.keys, tile.num_stages, spec.window or 0,
            sinks is not None, self._num_lines, overlaps, num_warps=tile.num_warps, **launch_options(overlaps),
        )  # fmt: skip
        if splits.usual > 1:
            self._reduce(rows.num_tokens, metadata, sinks, out[rows.start :], parts, splits)

    def _new_parts(self, q: Tensor, num_places: int) -> Parts:
        num_parts = num_places * self._spec.num_heads
        sizes = (num_parts * self._spec.value_dim, num_parts, num_parts)
        mixed, best, total = q.new_empty(sum(sizes), dtype=torch.float32).split(sizes)
        return mixed, best, total

    def _reduce(
        self, num_places: int, metadata: Metadata, sinks: Tensor | None, out: Tensor, parts: Parts, splits: Splits,
        tokens: int = 1, keys: int = 1,
    ) -> None:  # fmt: skip
        """`tokens` and `keys`: of the tile of uniform rows."""
        spec, overlaps = self._spec, self._machine.can_overlap
        summed, num_warps = (FEW_SPLITS, 1) if splits.most <= FEW_SPLITS else (MANY_SPLITS, 4)
        window = spec.window or 0 if splits.is_uniform else 0
        metadata.launches(
            reduce_kernel, (num_places, spec.num_heads),
            sinks, out, *parts, metadata.buffers.context_lens, splits.by_row, splits.first_extra, splits.extra_rows,
            num_places, splits.usual, spec.num_heads, spec.value_dim, self._width, tokens, keys, summed, window,
            sinks is not None, splits.is_uniform, splits.num_extra > 0, False, overlaps,
            num_warps=num_warps, **launch_options(overlaps),
        )  # fmt: skip

    def _keys(self) -> int:
        """16 KB of keys, and as much of values, at a time."""
        return max(16, min(128, 16384 // self._row_bytes))

    def _tile_of_rows(self, num_rows: int, tokens: int) -> Tile:
        """Fewer keys at a time for few rows, of which each has many programs with little to do."""
        queries = max(16, triton.next_power_of_2(tokens * self._group))
        num_stages = 3 if self._machine.shared_memory > 120_000 and self._dim <= 256 else 2
        keys = max(16, self._keys() // 2) if num_rows <= FEW_ROWS else self._keys()
        return Tile(queries, tokens, keys, num_stages, 4)

    def _tile_of_chunks(self) -> Tile:
        is_half = self._dtype.itemsize == 2
        queries = (128 if self._dim <= 128 else 64) if is_half else (32 if self._dim <= 128 else 16)
        queries = max(queries, triton.next_power_of_2(self._group))
        num_stages = 3 if self._machine.shared_memory > 160_000 and self._dim <= 256 else 2
        num_warps = 8 if queries >= 128 or self._dim > 256 else 4
        return Tile(queries, queries // self._group, self._keys(), num_stages, num_warps)


def supports_gqa(spec: GqaSpec, device: torch.device, dtype: torch.dtype) -> bool:
    if spec.dtype == FP8:
        is_known = dtype.itemsize == 2 and (device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9))
    else:
        is_known = spec.dtype == dtype and dtype in (torch.bfloat16, torch.float16, torch.float32)
    is_fitting = spec.value_dim <= spec.head_dim <= 512 and spec.head_dim % 2 == 0
    return is_known and is_fitting and spec.num_heads // spec.num_kv_heads <= 128
