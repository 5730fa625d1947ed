"""From the slots' state to a step's buffers, and from a step's tokens to the slots' state: a kernel each."""

import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.prepare import PrepareKernel, RememberKernel
from worker.kernels.step import SlotTables, StagedRows, Step, StepBuffers
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before

TILE = 256
"""Tokens, or entries of a block table, of a row that a program fills; rows that one remembers."""


@triton.jit(
    do_not_specialize=["num_rows", "num_uniform_rows", "uniform_len", "table_width", "spare_slot"],
    do_not_specialize_on_alignment=["row_slots", "row_starts", "row_lens"],
)
def _prepare_kernel(
    row_slots, row_starts, row_lens,
    slot_tokens, slot_lengths, slot_tables, slot_groups,
    input_ids, positions, token_slots, query_starts, context_lens, next_positions, block_tables, groups,
    num_rows, num_uniform_rows, uniform_len, table_width, spare_slot, tokens_stride, slot_table_stride, table_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program for `TILE` tokens and as many entries of the block table of a row; the first writes the row's own."""
    let_next_begin(OVERLAPS)
    row, tile = tl.program_id(0), tl.program_id(1)
    place = tile * TILE + tl.arange(0, TILE)
    slot = tl.load(row_slots + row)
    is_padding = slot == spare_slot
    is_uniform = row < num_uniform_rows
    length = tl.load(row_lens + row)
    start = tl.where(is_uniform, tl.load(slot_lengths + slot) - 1, tl.load(row_starts + row))

    # Tokens of the step before the row's: uniform rows are alike, the chunks before are added up.
    before = (tl.minimum(row, num_uniform_rows) * uniform_len).to(tl.int64)
    for first in range(num_uniform_rows, row, TILE):
        chunk = first + tl.arange(0, TILE)
        before += tl.sum(tl.load(row_lens + chunk, mask=chunk < row, other=0))

    if tile == 0:
        tl.store(query_starts + row + 1, before + length)
        next_position = tl.where(is_padding, 0, start + length)
        tl.store(context_lens + row, next_position)
        tl.store(next_positions + row, next_position)
        tl.store(groups + row, tl.load(slot_groups + slot))

    in_table = place < table_width
    table = slot_tables + slot * slot_table_stride
    tl.store(block_tables + row * table_stride + place, tl.load(table + place, mask=in_table, other=0), mask=in_table)

    in_row = place < length
    position = start + place
    token = tl.load(slot_tokens + slot * tokens_stride + position, mask=in_row, other=0)
    block = tl.load(table + position // BLOCK_SIZE, mask=in_row, other=0).to(tl.int64)
    token_slot = tl.where(is_padding, -1, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(input_ids + before + place, token.to(tl.int64), mask=in_row)
    tl.store(positions + before + place, position, mask=in_row)
    tl.store(token_slots + before + place, token_slot, mask=in_row)


class TritonPrepare(PrepareKernel):
    def __init__(self, machine: Machine) -> None:
        self._overlaps = machine.can_overlap

    def __call__(self, rows: StagedRows, slots: SlotTables, step: Step, block_size: int, out: StepBuffers) -> None:
        table_width = triton.cdiv(step.max_context_len, block_size)
        longest = max(step.uniform_len, table_width, max((chunk.num_tokens for chunk in step.chunks), default=0))
        _prepare_kernel[(step.num_rows, triton.cdiv(longest, TILE))](
            rows.slots, rows.starts, rows.lens,
            slots.tokens, slots.lengths, slots.block_tables, slots.groups,
            out.input_ids, out.positions, out.token_slots, out.query_starts, out.context_lens, out.next_positions,
            out.block_tables, out.groups,
            step.num_rows, step.num_uniform_rows, step.uniform_len, table_width,
            slots.spare_slot if step.num_padding_rows else -1,
            slots.tokens.stride(0), slots.block_tables.stride(0), out.block_tables.stride(0),
            block_size, TILE, self._overlaps, num_warps=4,
        )  # fmt: skip


@triton.jit
def keep_token(tokens, lengths, slot, position, token, tokens_stride, is_row):
    """As the last known one of the slot's sequence."""
    tl.store(tokens + slot * tokens_stride + position, tl.maximum(token, 0).to(tl.int32), mask=is_row)
    tl.store(lengths + slot, position + 1, mask=is_row)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "positions", "token_ids"])
def _remember_kernel(
    tokens, lengths, rows, positions, token_ids, num_rows, tokens_stride, ROWS: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    slot, position = tl.load(rows + row, mask=is_row), tl.load(positions + row, mask=is_row)
    keep_token(tokens, lengths, slot, position, tl.load(token_ids + row, mask=is_row), tokens_stride, is_row)


class TritonRemember(RememberKernel):
    def __init__(self, machine: Machine) -> None:
        self._overlaps = machine.can_overlap

    def __call__(self, slots: SlotTables, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        _remember_kernel[(triton.cdiv(len(rows), TILE),)](
            slots.tokens, slots.lengths, rows, positions, token_ids, len(rows), slots.tokens.stride(0), TILE,
            self._overlaps, num_warps=4, **launch_options(self._overlaps),
        )  # fmt: skip
