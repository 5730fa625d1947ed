"""Multi-head latent attention over a paged cache, in Triton.

Rows that decode and short chunks are absorbed: queries and mixtures go through the expanding product, one matrix a
head, and what is between reads the cache. Long chunks expand their context, a piece at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker.kernels.elementwise import RopeTable
from worker.kernels.mla import LatentNorm, LatentPool, MlaKernel, MlaSpec
from worker.kernels.step import Step, StepBuffers
from worker.kernels.torch.slots import context_slots
from worker.kernels.triton.gqa_attend import reduce_kernel
from worker.kernels.triton.gqa_splits import Splits, chunk_splits, deal_splits
from worker.kernels.triton.launch import Launches
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.mla_attend import attend_latents_kernel
from worker.kernels.triton.mla_expanded import attend_expanded_kernel
from worker.kernels.triton.mla_heads import product_by_head
from worker.kernels.triton.mla_steps import LONG_CHUNK, all_steps, graph_contexts
from worker.kernels.triton.mla_tiles import MAX_UNIFORM, Tile, expanded_tile_of, head_blocks, tile_of
from worker.kernels.triton.mla_write import write_kernel
from worker.kernels.triton.overlap import LINE_BYTES, launch_options

LOG2_E = 1.4426950408889634
EXPANDED_BYTES = 1 << 27
"""Of keys and values that are expanded at a time."""
WRITE_HEADS = 32
"""That a program of `write_kernel` takes."""


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Tokens next to each other that read the cache in one launch."""

    start: int
    """In the step."""
    num_tokens: int
    tables: Tensor
    """int32: each row's blocks, or each token's chosen slots."""
    tile: Tile
    num_programs: int
    """For a block of heads and a split, if there are no more than usual."""
    splits: Splits
    first_row: int = 0
    num_rows: int = 0
    top_k: int = 0
    """How many slots are chosen; 0: the whole context is read."""


@dataclass(frozen=True, slots=True)
class Expanded:
    """A chunk whose context is expanded."""

    start: int
    num_tokens: int
    slots: Tensor
    """int64 [context]"""


@dataclass(frozen=True, slots=True)
class Metadata:
    num_tokens: int
    buffers: StepBuffers
    block_size: int
    parts: tuple[Absorbed | Expanded, ...]
    launches: Launches


class TritonMla(MlaKernel):
    """The cache is [layers, blocks + spare, block_size, L + P]."""

    def __init__(self, spec: MlaSpec, machine: Machine) -> None:
        self._spec, self._machine = spec, machine
        self._num_lines = triton.next_power_of_2(triton.cdiv(spec.row_dim * spec.dtype.itemsize, LINE_BYTES.value))

    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> LatentPool:
        shape = (num_layers, num_blocks, block_size, self._spec.row_dim)
        pool = torch.empty(shape, dtype=self._spec.dtype, device=device)
        return LatentPool(list(pool), [pool.transpose(0, 1)])

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return graph_contexts(self._spec, self._machine, num_rows, max_context_len)

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterator[Step]:
        return all_steps(self._spec, self._machine, max_rows, max_tokens, max_context_len)

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> Metadata:
        parts = tuple(self._parts(step, buffers, block_size))
        return Metadata(step.num_tokens, buffers, block_size, parts, Launches())

    def _parts(self, step: Step, buffers: StepBuffers, block_size: int) -> Iterator[Absorbed | Expanded]:
        """Uniform rows; then chunks in their order, long ones alone, others together."""
        if step.uniform_len > MAX_UNIFORM:
            yield from self._chunks(buffers, 0, step.num_uniform_tokens, 0, step.num_uniform_rows, step.max_context_len)
        elif step.num_uniform_rows:
            yield self._rows(step, buffers)
        token, together, longest = step.num_uniform_tokens, 0, 0
        first, first_row = token, step.num_uniform_rows
        for row, chunk in enumerate(step.chunks, step.num_uniform_rows):
            if chunk.num_tokens >= LONG_CHUNK:
                yield from self._chunks(buffers, first, token - first, first_row, together, longest)
                slots = context_slots(buffers.block_tables[row, None], chunk.context_len, block_size)[0]
                yield Expanded(token, chunk.num_tokens, slots)
                first, first_row, together, longest = token + chunk.num_tokens, row + 1, 0, 0
            else:
                together, longest = together + 1, max(longest, chunk.context_len)
            token += chunk.num_tokens
        yield from self._chunks(buffers, first, token - first, first_row, together, longest)

    def _rows(self, step: Step, buffers: StepBuffers) -> Absorbed:
        """The uniform ones."""
        num_rows, tile = step.num_uniform_rows, tile_of(self._spec, self._machine, step.uniform_len)
        splits = deal_splits(
            self._machine, head_blocks(self._spec, tile), buffers.context_lens[:num_rows], step.uniform_len,
            step.max_context_len, resident=tile.resident,
        )  # fmt: skip
        num_programs = num_rows * splits.usual + splits.num_extra
        return Absorbed(0, step.num_uniform_tokens, buffers.block_tables, tile, num_programs, splits, num_rows=num_rows)

    def _chunks(
        self, buffers: StepBuffers, start: int, num_tokens: int, first_row: int, num_rows: int, longest: int
    ) -> Iterator[Absorbed]:
        """Rows of any lengths, if there are any; a tile has tokens of one of them."""
        if num_rows:
            tile = tile_of(self._spec, self._machine)
            # As many tiles as the rows can have: each begins one of its own.
            num_tiles = num_tokens // tile.tokens + num_rows
            splits = chunk_splits(self._machine, num_tiles * head_blocks(self._spec, tile), longest)
            yield Absorbed(start, num_tokens, buffers.block_tables, tile, num_tiles, splits, first_row, num_rows)

    def write(
        self, x: Tensor, norm: LatentNorm, rope: RopeTable, cache: Tensor, metadata: Metadata
    ) -> tuple[Tensor, Tensor]:
        spec, buffers, num_tokens = self._spec, metadata.buffers, len(x)
        overlaps = self._machine.overlaps(num_tokens)
        q_rope = x.new_empty(num_tokens, spec.num_heads, spec.rope_dim)
        metadata.launches(
            write_kernel, (num_tokens, triton.cdiv(spec.num_heads, WRITE_HEADS)),
            x, q_rope, norm.weight, rope.cos, rope.sin, buffers.positions, buffers.token_slots, cache, norm.eps,
            x.stride(0), spec.num_heads, spec.latent_dim, spec.rope_dim, spec.nope_dim, WRITE_HEADS,
            spec.is_interleaved, overlaps, num_warps=4, **launch_options(overlaps),
        )  # fmt: skip
        q = x[:, : spec.num_heads * spec.head_dim].unflatten(-1, (spec.num_heads, spec.head_dim))
        return q[..., : spec.nope_dim], q_rope

    def attend(
        self, q_nope: Tensor, q_rope: Tensor, cache: Tensor, expand: Tensor, metadata: Metadata,
        chosen: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = q_nope.new_empty(len(q_nope), self._spec.num_heads, self._spec.v_head_dim)
        for part in metadata.parts if chosen is None else [self._of_chosen(chosen)]:
            if isinstance(part, Absorbed):
                self._attend_absorbed(q_nope, q_rope, cache, expand, metadata, part, out)
            else:
                self._attend_expanded(q_nope, q_rope, cache, expand, metadata, part, out)
        return out.flatten(1)

    def _of_chosen(self, chosen: Tensor) -> Absorbed:
        num_tokens, top_k = chosen.shape
        tile = tile_of(self._spec, self._machine, 1)
        splits = chunk_splits(self._machine, num_tokens * head_blocks(self._spec, tile), top_k)
        return Absorbed(0, num_tokens, chosen, tile, num_tokens, splits, num_rows=num_tokens, top_k=top_k)

    def _attend_absorbed(
        self, q_nope: Tensor, q_rope: Tensor, cache: Tensor, expand: Tensor, metadata: Metadata, part: Absorbed,
        out: Tensor,
    ) -> None:  # fmt: skip
        spec, at = self._spec, slice(part.start, part.start + part.num_tokens)
        overlaps = self._machine.overlaps(metadata.num_tokens)
        q_latent = q_nope.new_empty(spec.num_heads, part.num_tokens, spec.latent_dim)
        launches = metadata.launches
        product_by_head(q_nope[at], expand[:, : spec.nope_dim], q_latent.transpose(0, 1), launches, overlaps=overlaps)
        mixed = q_nope.new_empty(part.num_tokens, spec.num_heads, spec.latent_dim)
        self._launch(q_latent, q_rope[at], cache, metadata, part, mixed)
        product_by_head(mixed, expand[:, spec.nope_dim :].transpose(1, 2), out[at], launches, overlaps=overlaps)

    def _launch(
        self, q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: Metadata, part: Absorbed, mixed: Tensor
    ) -> None:
        """q_latent [H, n, L], q_rope [n, H, P] → mixed [n, H, L]"""
        spec, buffers, tile, splits = self._spec, metadata.buffers, part.tile, part.splits
        overlaps = self._machine.overlaps(metadata.num_tokens)
        if splits.is_uniform:
            third, places = 1, part.num_programs * tile.tokens
        else:
            third, places = splits.usual, part.num_tokens * splits.usual
        parts = self._new_parts(mixed, places) if splits.most > 1 else (mixed, mixed, mixed)
        metadata.launches(
            attend_latents_kernel, (head_blocks(spec, tile), part.num_programs, third),
            q_latent, q_rope, cache, part.tables, mixed, *parts, buffers.query_starts, buffers.context_lens,
            splits.by_row, splits.first_extra, splits.extra_rows,
            spec.scale * LOG2_E, q_latent.stride(0), part.tables.stride(0), part.first_row, part.num_rows, part.start,
            part.num_tokens, splits.usual, part.top_k,
            spec.num_heads, spec.latent_dim, spec.rope_dim, metadata.block_size,
            tile.queries, tile.heads, tile.tokens, tile.keys, tile.num_stages,
            splits.is_uniform, splits.num_extra > 0, part.top_k > 0, self._num_lines, overlaps,
            num_warps=tile.num_warps, **launch_options(overlaps),
        )  # fmt: skip
        if splits.most > 1:
            programs = splits.num_extra * tile.tokens if splits.is_extra_only else part.num_tokens
            metadata.launches(
                reduce_kernel, (programs, spec.num_heads),
                None, mixed, *parts, buffers.context_lens, splits.by_row, splits.first_extra, splits.extra_rows,
                part.num_tokens, splits.usual, spec.num_heads, spec.latent_dim, spec.latent_dim, tile.tokens, tile.keys,
                splits.most, 0, False, splits.is_uniform, splits.num_extra > 0, splits.is_extra_only, overlaps,
                num_warps=min(8, max(1, splits.most // 8)), **launch_options(overlaps),
            )  # fmt: skip

    def _new_parts(self, like: Tensor, num_places: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of splits: latents mixed, maximum and sum of the softmax, in float32."""
        num_parts = num_places * self._spec.num_heads
        sizes = (num_parts * self._spec.latent_dim, num_parts, num_parts)
        mixed, best, total = like.new_empty(sum(sizes), dtype=torch.float32).split(sizes)
        return mixed, best, total

    def _attend_expanded(
        self, q_nope: Tensor, q_rope: Tensor, cache: Tensor, expand: Tensor, metadata: Metadata, part: Expanded,
        out: Tensor,
    ) -> None:  # fmt: skip
        spec, num_keys, tile = self._spec, len(part.slots), expanded_tile_of(self._spec, self._machine)
        num_together = max(LONG_CHUNK, EXPANDED_BYTES // (expand.shape[0] * expand.shape[1] * spec.dtype.itemsize))
        num_kept = part.num_tokens * spec.num_heads if num_keys > num_together else 0
        state = out.new_empty(num_kept * (spec.v_head_dim + 2), dtype=torch.float32)
        mixed, best, total = state.split((num_kept * spec.v_head_dim, num_kept, num_kept))
        for first in range(0, num_keys, num_together):
            rows = cache.flatten(0, 1).index_select(0, part.slots[first : first + num_together])
            expanded = torch.mm(rows[:, : spec.latent_dim], expand.flatten(0, 1).T)
            metadata.launches(
                attend_expanded_kernel, (spec.num_heads, triton.cdiv(part.num_tokens, tile.queries)),
                q_nope, q_rope, expanded, rows, out, mixed, best, total, spec.scale * LOG2_E, q_nope.stride(0),
                part.start, part.num_tokens, num_keys - part.num_tokens, first, len(rows),
                int(first == 0), int(first + num_together >= num_keys),
                spec.num_heads, spec.head_dim, spec.nope_dim, spec.rope_dim, spec.v_head_dim, spec.latent_dim,
                tile.queries, tile.keys, tile.num_stages, num_warps=tile.num_warps,
            )  # fmt: skip


def supports_mla(spec: MlaSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """Tiles are powers of two. Products of float32 take no tensor cores, and long to compile."""
    sizes = (spec.latent_dim, spec.rope_dim, spec.nope_dim, spec.v_head_dim)
    has_tiles = all(size >= 16 and size & (size - 1) == 0 for size in sizes)
    return spec.dtype == dtype and has_tiles and (dtype.itemsize == 2 or spec.latent_dim <= 128)
