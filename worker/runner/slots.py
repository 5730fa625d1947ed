"""Per-slot state that stays from step to step: tokens, block tables, sampling parameters."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from worker.core.batch import NewSequence, ScheduledBatch
from worker.kernels.sampling import NUM_FLOATS, NUM_INTEGERS, Parameters
from worker.kernels.step import SlotTables
from worker.runner.staging import as_bits
from worker.sampling.parameters import pack
from worker.sampling.rules import SlotRules, allowed_bits, is_restricted


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    num_prompt_tokens: int
    num_most_likely: int


class SlotState:
    """Rows of persistent device tensors, one a slot, and behind them the spare slot of padding and dummy steps.

    The spare slot's sequence is one token long; its table names the spare block alone.
    """

    def __init__(
        self,
        num_slots: int,
        max_blocks: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        *,
        spare_block: int,
        spare_group: int = 0,
    ) -> None:
        self._max_blocks, self._spare_group = max_blocks, spare_group
        self._max_tokens = max_model_len + 1
        num_rows = num_slots + 1
        self.tables = SlotTables(
            tokens=torch.zeros(num_rows, self._max_tokens, dtype=torch.int32, device=device),
            lengths=torch.ones(num_rows, dtype=torch.int64, device=device),
            block_tables=torch.full((num_rows, max_blocks), spare_block, dtype=torch.int32, device=device),
            groups=torch.full((num_rows,), spare_group, dtype=torch.int64, device=device),
        )
        self.parameters = Parameters.neutral(num_rows, device)
        self.allowed = torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
        """A bit for each token that the slot's lists of allowed and banned tokens leave."""
        self._vocab_size = vocab_size
        self.rules = SlotRules(num_rows, vocab_size, device)
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        """Of the slots whose prompt tokens' log probabilities are asked for."""
        self._table_lens = [0] * num_rows

    @property
    def spare_slot(self) -> int:
        return self.tables.spare_slot

    def stage(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """Take over the batch's news about slots; returns what `apply` needs on the device (nothing: empty)."""
        places: list[int] = []
        blocks: list[int] = []
        for new in batch.new_sequences:
            self._bind(new)
            self._append(new.slot, new.block_ids, places, blocks)
        for slot, ids in batch.new_block_ids:
            self._append(slot, ids, places, blocks)
        for slot, index, block in batch.replaced_block_ids:
            places.append(slot * self._max_blocks + index)
            blocks.append(block)
        staged = {}
        if places:
            # One place may be written twice (a new table, then a replacement): the last one counts.
            table = dict(zip(places, blocks, strict=True))
            staged["table_places"] = np.fromiter(table.keys(), np.int64, len(table))
            staged["table_blocks"] = np.fromiter(table.values(), np.int64, len(table))
        if batch.num_draft_tokens:
            staged |= self._stage_drafts(batch)
        if batch.new_sequences:
            by_slot = {new.slot: new for new in batch.new_sequences}
            staged |= self._stage_bindings(by_slot) | self._stage_lists(by_slot)
        return staged

    def apply(self, staged: dict[str, Tensor]) -> None:
        """Bring the device tensors up to date, ordered after all earlier steps."""
        tables = self.tables
        if "table_places" in staged:
            tables.block_tables.view(-1).index_copy_(0, staged["table_places"], staged["table_blocks"].int())
        if "new_slots" in staged:
            slots = staged["new_slots"]
            self.parameters.integers.index_copy_(0, slots, staged["new_integers"].view(-1, NUM_INTEGERS))
            self.parameters.floats.index_copy_(0, slots, staged["new_floats"].view(torch.float64).view(-1, NUM_FLOATS))
            tables.lengths.index_copy_(0, slots, staged["new_lengths"])
            tables.groups.index_copy_(0, slots, staged["new_groups"])
            tables.tokens.view(-1).index_copy_(0, staged["token_places"], staged["tokens"].int())
            self.allowed.index_fill_(0, slots, -1)
        if "draft_places" in staged:
            tables.tokens.view(-1).index_copy_(0, staged["draft_places"], staged["drafts"].int())
        if "restricted_slots" in staged:
            slots, num_words = staged["restricted_slots"], self.allowed.shape[1]
            words = staged["allowed_words"].view(torch.int32)[: len(slots) * num_words]
            self.allowed.index_copy_(0, slots, words.view(-1, num_words))

    def _bind(self, new: NewSequence) -> None:
        self.rules.bind(new)
        self.prompt_logprobs.pop(new.slot, None)
        if new.sampling.num_prompt_logprobs is not None:
            self.prompt_logprobs[new.slot] = PromptLogprobs(new.num_prompt_tokens, new.sampling.num_prompt_logprobs)
        self._table_lens[new.slot] = 0

    def _stage_bindings(self, by_slot: dict[int, NewSequence]) -> dict[str, np.ndarray]:
        news = by_slot.values()
        integers, floats = pack(news)
        places = [np.arange(len(new.token_ids)) + new.slot * self._max_tokens for new in news]
        return {
            "new_slots": np.fromiter(by_slot.keys(), np.int64, len(by_slot)),
            "new_integers": np.array(integers, np.uint64).view(np.int64).reshape(-1),
            "new_floats": as_bits([x for row in floats for x in row]),
            "new_lengths": np.array([len(new.token_ids) for new in news], np.int64),
            "new_groups": np.array([self._spare_group if new.group_id < 0 else new.group_id for new in news], np.int64),
            "token_places": np.concatenate(places),
            "tokens": np.concatenate([np.array(new.token_ids, np.int64) for new in news]),
        }

    def _stage_drafts(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """Behind the known tokens of their slots, where the step's rows, penalties and bad sequences find them."""
        ends = list(accumulate(batch.num_scheduled_tokens))
        places, drafts = [], []
        for row, num in batch.num_draft_tokens.items():
            end = batch.num_computed_tokens[row] + batch.num_scheduled_tokens[row]
            places.append(np.arange(end - num, end) + batch.slots[row] * self._max_tokens)
            drafts.append(np.array(batch.input_ids[ends[row] - num : ends[row]], np.int64))
        return {"draft_places": np.concatenate(places), "drafts": np.concatenate(drafts)}

    def _stage_lists(self, by_slot: dict[int, NewSequence]) -> dict[str, np.ndarray]:
        restricted = [new for new in by_slot.values() if is_restricted(new.sampling)]
        if not restricted:
            return {}
        words = np.concatenate([allowed_bits(new.sampling, self._vocab_size) for new in restricted])
        return {
            "restricted_slots": np.array([new.slot for new in restricted], np.int64),
            "allowed_words": np.pad(words, (0, len(words) % 2)).view(np.int64),
        }

    def _append(self, slot: int, ids: tuple[int, ...] | list[int], places: list[int], blocks: list[int]) -> None:
        at = slot * self._max_blocks + self._table_lens[slot]
        self._table_lens[slot] += len(ids)
        if self._table_lens[slot] > self._max_blocks:
            raise ValueError(f"slot {slot} was given {self._table_lens[slot]} blocks, at most {self._max_blocks} fit")
        places.extend(range(at, at + len(ids)))
        blocks.extend(ids)
