"""From the slots' state to a step's buffers, in torch."""

import torch
from torch import Tensor

from worker.kernels.step import SlotTables, StagedRows, Step, StepBuffers


def prepare_step(rows: StagedRows, slots: SlotTables, step: Step, block_size: int, out: StepBuffers) -> None:
    """See `PrepareKernel`."""
    num_rows, num_tokens = step.num_rows, step.num_tokens
    starts = _starts(rows, slots, step)
    context_lens = starts + rows.lens
    if num_tokens == num_rows:
        slot_of_token, positions = rows.slots, starts
        torch.arange(num_rows + 1, dtype=torch.int32, device=starts.device, out=out.query_starts[: num_rows + 1])
    else:
        ends = rows.lens.cumsum(0)
        out.query_starts[1 : num_rows + 1].copy_(ends)
        slot_of_token = rows.slots.repeat_interleave(rows.lens, output_size=num_tokens)
        offsets = (starts - ends + rows.lens).repeat_interleave(rows.lens, output_size=num_tokens)
        positions = offsets.add_(torch.arange(num_tokens, device=offsets.device))
    out.positions[:num_tokens].copy_(positions)
    out.input_ids[:num_tokens].copy_(slots.tokens[slot_of_token, positions])
    blocks = slots.block_tables[slot_of_token, positions // block_size]
    token_slots = torch.add(positions % block_size, blocks, alpha=block_size)
    if step.num_padding_rows:
        token_slots.masked_fill_(slot_of_token == slots.spare_slot, -1)
        context_lens.masked_fill_(rows.slots == slots.spare_slot, 0)
    out.token_slots[:num_tokens].copy_(token_slots)
    out.context_lens[:num_rows].copy_(context_lens)
    out.next_positions[:num_rows].copy_(context_lens)
    width = -(-step.max_context_len // block_size)
    out.block_tables[:num_rows, :width].copy_(slots.block_tables[:, :width].index_select(0, rows.slots))
    out.groups[:num_rows].copy_(slots.groups.index_select(0, rows.slots))


def _starts(rows: StagedRows, slots: SlotTables, step: Step) -> Tensor:
    """Position of each row's first token: int64 [R]."""
    num_uniform = step.num_uniform_rows
    if not num_uniform:
        return rows.starts
    uniform = slots.lengths.index_select(0, rows.slots[:num_uniform]) - 1
    return torch.cat((uniform, rows.starts[num_uniform:])) if step.chunks else uniform


def remember(slots: SlotTables, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
    """See `RememberKernel`."""
    places = rows * slots.tokens.shape[1] + positions
    slots.tokens.view(-1).index_copy_(0, places, token_ids.clamp(min=0).int())
    slots.lengths.index_copy_(0, rows, positions + 1)
