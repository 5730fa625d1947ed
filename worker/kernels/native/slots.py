"""From the slots' state to a step's buffers, and back, in a call each. Neither slots nor buffers ever move, and most
steps have the rows of the one before."""

import torch
from torch import Tensor

from worker.kernels.native.library import Buffers, Slots, Staged, functions, obstacle, pointer
from worker.kernels.prepare import PrepareKernel, RememberKernel
from worker.kernels.step import SlotTables, StagedRows, Step, StepBuffers


class NativePrepare(PrepareKernel):
    def __init__(self) -> None:
        self._functions = functions()
        self._slots: tuple[SlotTables, Slots] | None = None
        self._buffers: tuple[StepBuffers, Buffers] | None = None
        self._rows: tuple[StagedRows, Staged] | None = None

    def __call__(self, rows: StagedRows, slots: SlotTables, step: Step, block_size: int, out: StepBuffers) -> None:
        if self._slots is None or self._slots[0] is not slots:
            self._slots = slots, _slots_view(slots)
        if self._buffers is None or self._buffers[0] is not out:
            self._buffers = out, _buffers_view(out)
        if self._rows is None or self._rows[0] is not rows:
            self._rows = rows, Staged(pointer(rows.slots), pointer(rows.starts), pointer(rows.lens))
        staged = self._rows[1]
        staged.num_rows, staged.num_uniform_rows = step.num_rows, step.num_uniform_rows
        staged.num_padding_rows, staged.block_size = step.num_padding_rows, block_size
        staged.table_width = -(-step.max_context_len // block_size)
        self._functions.fissile_prepare(staged, self._slots[1], self._buffers[1])


class NativeRemember(RememberKernel):
    def __init__(self) -> None:
        self._functions = functions()
        self._slots: tuple[SlotTables, Slots] | None = None

    def __call__(self, slots: SlotTables, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        if self._slots is None or self._slots[0] is not slots:
            tokens = slots.tokens
            self._slots = slots, Slots(pointer(tokens), pointer(slots.lengths), None, None, tokens.shape[1], 0, 0)
        self._functions.fissile_remember(
            self._slots[1], pointer(rows), pointer(positions), pointer(token_ids), rows.shape[0]
        )


def _slots_view(slots: SlotTables) -> Slots:
    return Slots(
        pointer(slots.tokens), pointer(slots.lengths), pointer(slots.block_tables), pointer(slots.groups),
        slots.tokens.shape[1], slots.block_tables.shape[1], slots.spare_slot,
    )  # fmt: skip


def _buffers_view(out: StepBuffers) -> Buffers:
    return Buffers(
        pointer(out.input_ids), pointer(out.positions), pointer(out.token_slots), pointer(out.query_starts),
        pointer(out.context_lens), pointer(out.next_positions), pointer(out.block_tables), pointer(out.groups),
        out.block_tables.shape[1],
    )  # fmt: skip


def supports_slots(_: None, device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and obstacle() is None
