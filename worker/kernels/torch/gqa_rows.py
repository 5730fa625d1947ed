"""What a step's rows read of a paged cache of K and V, as `TorchGqa` wants it: worked out once, for all layers."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.elementwise import RopeTable
from worker.kernels.gqa import GqaSpec
from worker.kernels.step import Chunk, Step, StepBuffers
from worker.kernels.torch.slots import context_slots


@dataclass(frozen=True, slots=True)
class ExactRows:
    """Uniform rows on a CPU: flat lists over all N (row, head, position in context) triples; Q = rows × heads."""

    key_rows: Tensor
    """int32 [N]: row of the cache, seen as [blocks × block_size × K, D], that the triple reads."""
    starts: Tensor
    """int32 [Q + 1]: first triple of each (row, head)."""
    gathered_rows: Tensor | None
    """int64 [rows × K × longest context]: the same for each (row, kv head, position), where keys must be gathered."""
    padded_shape: tuple[int, int]
    """(Q, longest context)."""
    padded_index: Tensor | None
    """int64 [N]: place of each triple in the padded scores; None when all contexts are equally long."""


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Uniform rows where the host does not know their lengths; C the longest context."""

    key_rows: Tensor
    """int64 [rows × K × C]: row of the cache, seen as [blocks × block_size × K, D]; past a row's context that of its
    first token."""
    hidden: Tensor
    """bool [rows, 1, uniform_len, 1, C]: what a token does not see."""


@dataclass(frozen=True, slots=True)
class ChunkRow:
    num_tokens: int
    token_slots: Tensor | None
    """int64 [context] of the whole context, in order; None where this step's tokens are all there is."""
    mask: Tensor | None
    """[num_tokens, context] of 0 and −inf, or None when the row has no prefix and plain causality does."""


@dataclass(frozen=True, slots=True)
class Metadata:
    step: Step
    positions: Tensor
    """int64 [T]"""
    write_slots: Tensor
    """int64 [T]; what writes nothing goes to the spare block."""
    uniform: ExactRows | PaddedRows | None
    chunks: tuple[ChunkRow, ...]
    angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Rows of a rope table for this step's positions, by the table's identity."""

    def rope_rows(self, rope: RopeTable) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, 1, D]; looked up once a step."""
        found = self.angles.get(id(rope))
        if found is None:
            found = rope.cos.index_select(0, self.positions)[:, None], rope.sin.index_select(0, self.positions)[:, None]
            self.angles[id(rope)] = found
        return found


def exact_rows(
    spec: GqaSpec, step: Step, buffers: StepBuffers, tables: Tensor, block_size: int, *, gathers_keys: bool
) -> ExactRows:
    """`tables`: int32 [R, blocks]. Reads the rows' lengths on the host."""
    num_rows, heads, kv_heads = step.num_uniform_rows, spec.num_heads, spec.num_kv_heads
    lens = buffers.context_lens[:num_rows].long()
    longest = int(lens.max())
    token_slots = context_slots(tables[:num_rows], longest, block_size)
    if spec.window is not None:
        first = (lens - spec.window).clamp_(min=0)
        lens = lens - first
        longest = int(lens.max())
        within = first[:, None] + torch.arange(longest)
        token_slots = token_slots.gather(1, within.clamp_(max=token_slots.shape[1] - 1))
    by_kv_head = token_slots[:, None, :] * kv_heads + torch.arange(kv_heads)[:, None]
    key_rows = by_kv_head.repeat_interleave(heads // kv_heads, 1, output_size=heads).flatten()
    padded_index = None
    head_lens = lens.repeat_interleave(heads)
    starts = functional.pad(head_lens.cumsum(0), (1, 0))
    if int(lens.min()) != longest:
        gaps = torch.arange(len(head_lens)) * longest - starts[:-1]
        padded_index = torch.arange(int(starts[-1])) + gaps.repeat_interleave(head_lens)
        key_rows = key_rows.index_select(0, padded_index)
    return ExactRows(
        key_rows=key_rows.int(),
        gathered_rows=by_kv_head.flatten() if gathers_keys else None,
        starts=starts.int(),
        padded_shape=(num_rows * heads, longest),
        padded_index=padded_index,
    )


def padded_rows(spec: GqaSpec, step: Step, buffers: StepBuffers, tables: Tensor, block_size: int) -> PaddedRows:
    """`tables`: int32 [R, blocks]. Reads nothing on the host."""
    num_rows, length = step.num_uniform_rows, step.uniform_len
    lens = buffers.context_lens[:num_rows].long()[:, None]
    positions = torch.arange(step.max_context_len, device=tables.device)
    token_slots = context_slots(tables[:num_rows], step.max_context_len, block_size)
    token_slots = torch.where(positions < lens, token_slots, token_slots[:, :1])
    kv_heads = torch.arange(spec.num_kv_heads, device=tables.device)[:, None]
    key_rows = token_slots[:, None, :] * spec.num_kv_heads + kv_heads
    last_seen = (lens - length + torch.arange(length, device=tables.device)).clamp_(min=0)
    return PaddedRows(key_rows.flatten(), _hidden(spec, positions, last_seen[:, :, None])[:, None, :, None])


def _hidden(spec: GqaSpec, positions: Tensor, query_positions: Tensor) -> Tensor:
    """bool: which of the keys at `positions` each query does not see."""
    hidden = positions > query_positions
    return hidden if spec.window is None else hidden | (positions <= query_positions - spec.window)


def chunk_row(spec: GqaSpec, dtype: torch.dtype, chunk: Chunk, table: Tensor, block_size: int) -> ChunkRow:
    """`dtype`: of activations; `table`: int32 [blocks]."""
    num_tokens, context_len = chunk.num_tokens, chunk.context_len
    token_slots = None
    if num_tokens != context_len:
        token_slots = context_slots(table[None], context_len, block_size)[0]
    elif spec.window is None and not spec.has_sinks:
        return ChunkRow(num_tokens, None, None)
    positions = torch.arange(context_len, device=table.device)
    hidden = _hidden(spec, positions, positions[context_len - num_tokens :, None])
    mask = torch.zeros(num_tokens, context_len, device=table.device, dtype=dtype)
    return ChunkRow(num_tokens, token_slots, mask.masked_fill_(hidden, -torch.inf))
