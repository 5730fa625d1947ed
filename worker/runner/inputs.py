"""Phase 1 of a step, prepare: from a `ScheduledBatch` to tensors on the device, in one copy."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.attention.gqa import GQABuilder
from worker.core.batch import DEFERRED_TOKEN, ScheduledBatch
from worker.runner.forward_context import ForwardContext
from worker.runner.slots import SlotState
from worker.runner.staging import Staging


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step on the device. Tokens and sampling rows are in the runner's order, not the batch's."""

    input_ids: Tensor
    """int64 [T]"""
    context: ForwardContext
    sampled_rows: list[int]
    """Batch rows that get a token, in the order of the tensors below."""
    logit_tokens: Tensor
    """int64 [R]: which token of the step each sampled row's logits come from."""
    other_rows: list[int]
    """Batch rows that get none: all but the last chunk of a prompt."""
    other_tokens: Tensor
    """int64 [U]: the last token of each of these."""
    sampled_slots: Tensor
    """int64 [R]"""
    sampled_positions: Tensor
    """int64 [R]: position, in its sequence, of the token to be sampled."""
    longest_sampled: int
    """The largest of these; 0 if there is none."""
    prompt: "PromptInputs | None"
    """None: nobody asks for log probabilities of prompt tokens of this step."""


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """Tokens of this step that another prompt token follows, in rows that ask for log probabilities of those."""

    rows: list[tuple[int, int, int]]
    """(batch row, how many, most likely tokens that it asks for), in the order of the tensors below."""
    step_tokens: Tensor
    """int64 [P]: which token of the step."""
    slots: Tensor
    """int64 [P]"""
    next_positions: Tensor
    """int64 [P]: position, in its sequence, of the token that follows."""


class InputBuilder:
    def __init__(self, slots: SlotState, builder: GQABuilder, block_size: int, device: torch.device) -> None:
        self._slots, self._builder, self._block_size = slots, builder, block_size
        self._staging = Staging(device)

    def prepare(self, batch: ScheduledBatch) -> StepInputs:
        """Apply the batch's deltas to the slots and build the step's tensors. Does not wait for the device."""
        order, num_decode_rows = _decode_first(batch.num_scheduled_tokens)
        query_lens = [batch.num_scheduled_tokens[row] for row in order]
        computed = [batch.num_computed_tokens[row] for row in order]
        context_lens = [a + b for a, b in zip(query_lens, computed, strict=True)]
        sampled = [i for i, row in enumerate(order) if batch.samples[row]]
        others = [i for i, row in enumerate(order) if not batch.samples[row]]

        lens = np.array(query_lens)
        ends = lens.cumsum()
        row_of_token = np.repeat(np.arange(len(order)), lens)
        arrays = {
            "input_ids": _ordered_ids(batch, order),
            "positions": np.arange(ends[-1]) + np.repeat(np.array(computed) - (ends - lens), lens),
            "slots": np.array([batch.slots[row] for row in order]),
            "row_of_token": row_of_token,
            "logit_tokens": ends[sampled] - 1,
            "other_tokens": ends[others] - 1,
            "sampled_slots": np.array([batch.slots[order[i]] for i in sampled], np.int64),
            "sampled_positions": np.array([context_lens[i] for i in sampled], np.int64),
        }
        news = self._slots.stage(batch)
        prompt_rows = self._prompt_rows(batch, order)
        staged = self._staging.to_device(arrays | news | _prompt_arrays(batch, prompt_rows, ends - lens))
        self._slots.apply(staged)

        slot_of_token = staged["slots"].index_select(0, staged["row_of_token"])
        input_ids, positions = staged["input_ids"], staged["positions"]
        if arrays["input_ids"].min() == DEFERRED_TOKEN:  # no id is below it
            remembered = self._slots.last_tokens.index_select(0, slot_of_token)
            input_ids = torch.where(input_ids == DEFERRED_TOKEN, remembered, input_ids)
        token_blocks = self._slots.block_tables[slot_of_token, positions // self._block_size]
        most_blocks = -(-max(context_lens) // self._block_size)
        tables = self._slots.block_tables[:, :most_blocks].index_select(0, staged["slots"])
        context = ForwardContext(
            positions=positions,
            token_slots=token_blocks * self._block_size + positions % self._block_size,
            num_decode_tokens=num_decode_rows,
            attention=self._builder.plan(query_lens, context_lens, num_decode_rows, tables),
        )
        return StepInputs(
            input_ids,
            context,
            [order[i] for i in sampled],
            staged["logit_tokens"],
            [order[i] for i in others],
            staged["other_tokens"],
            staged["sampled_slots"],
            staged["sampled_positions"],
            max((context_lens[i] for i in sampled), default=0),
            PromptInputs(
                [(row, num, most) for _, row, num, most in prompt_rows],
                staged["prompt_tokens"], staged["prompt_slots"], staged["prompt_positions"],
            ) if prompt_rows else None,
        )  # fmt: skip

    def _prompt_rows(self, batch: ScheduledBatch, order: list[int]) -> list[tuple[int, int, int, int]]:
        """(place in the runner's order, batch row, how many of its tokens another prompt token follows, most likely
        tokens that it asks for)."""
        found = []
        asking = self._slots.prompt_logprob_slots
        for place, row in enumerate(order if asking else ()):
            slot = batch.slots[row]
            if slot in asking:
                binding, computed = self._slots.bindings[slot], batch.num_computed_tokens[row]
                num = min(batch.num_scheduled_tokens[row], binding.num_prompt_tokens - 1 - computed)
                if num > 0:
                    found.append((place, row, num, binding.sampling.num_prompt_logprobs or 0))
        return found


def _decode_first(num_scheduled: list[int]) -> tuple[list[int], int]:
    """(rows, those with one token first and otherwise in the batch's order; how many those are)."""
    single = [row for row, num in enumerate(num_scheduled) if num == 1]
    longer = [row for row, num in enumerate(num_scheduled) if num != 1]
    return single + longer, len(single)


def _ordered_ids(batch: ScheduledBatch, order: list[int]) -> np.ndarray:
    ids = np.array(batch.input_ids, np.int64)
    if order == sorted(order):
        return ids
    ends = np.cumsum(batch.num_scheduled_tokens)
    return np.concatenate([ids[ends[row] - batch.num_scheduled_tokens[row] : ends[row]] for row in order])


def _prompt_arrays(
    batch: ScheduledBatch, rows: list[tuple[int, int, int, int]], starts: np.ndarray
) -> dict[str, np.ndarray]:
    """`starts`: index of each row's first token in the step, in the runner's order."""
    if not rows:
        return {}
    return {
        "prompt_tokens": np.concatenate([starts[place] + np.arange(num) for place, _, num, _ in rows]),
        "prompt_slots": np.concatenate([np.full(num, batch.slots[row]) for _, row, num, _ in rows]),
        "prompt_positions": np.concatenate(
            [batch.num_computed_tokens[row] + 1 + np.arange(num) for _, row, num, _ in rows]
        ),
    }
