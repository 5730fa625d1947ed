"""Per-slot state that stays from step to step: block tables, tokens, sampling parameters."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.core.batch import NewSequence, ScheduledBatch
from worker.core.params import SamplingParams
from worker.runner.staging import as_bits


@dataclass(frozen=True, slots=True)
class Binding:
    """What the host remembers of the sequence that a slot belongs to: it decides shapes and code paths."""

    sampling: SamplingParams
    num_prompt_tokens: int = 1
    min_length: int = 0
    ending_token_ids: tuple[int, ...] = ()

    @property
    def reads_tokens(self) -> bool:
        """Whether something of it depends on the tokens so far."""
        sampling = self.sampling
        asks_prompt = sampling.num_prompt_logprobs is not None
        return asks_prompt or sampling.has_penalties or bool(sampling.bad_token_sequences)


class SlotState:
    """Rows of persistent device tensors, one a slot."""

    def __init__(self, num_slots: int, max_blocks: int, max_model_len: int, device: torch.device) -> None:
        self._max_blocks = max_blocks
        self._max_tokens = max_model_len + 1
        self.block_tables = torch.zeros(num_slots, max_blocks, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """Last sampled token of each slot, for `DEFERRED_TOKEN`."""
        self.tokens = torch.zeros(num_slots, self._max_tokens, dtype=torch.int32, device=device)
        """Tokens by position, of slots whose binding `reads_tokens`. Those of an earlier owner may stand behind."""
        self.integers = torch.zeros(num_slots, 3, dtype=torch.int64, device=device)
        """top_k (0 for all), seed, number of prompt tokens."""
        self.floats = torch.zeros(num_slots, 6, dtype=torch.float64, device=device)
        """temperature, top_p, min_p, presence, frequency and repetition penalty."""
        self.bindings: list[Binding] = [Binding(SamplingParams())] * num_slots
        self.version = 0
        """Changes whenever a slot is bound anew."""
        self.prompt_logprob_slots: set[int] = set()
        """Slots whose prompt tokens' log probabilities are asked for."""
        self._table_lens = [0] * num_slots

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
        if batch.new_sequences:
            staged |= self._stage_bindings({new.slot: new for new in batch.new_sequences})
        return staged

    def apply(self, staged: dict[str, Tensor]) -> None:
        """Bring the device tensors up to date, ordered after all earlier steps."""
        if "table_places" in staged:
            self.block_tables.view(-1).index_copy_(0, staged["table_places"], staged["table_blocks"])
        if "new_slots" in staged:
            self.integers.index_copy_(0, staged["new_slots"], staged["new_integers"].view(-1, 3))
            self.floats.index_copy_(0, staged["new_slots"], staged["new_floats"].view(torch.float64).view(-1, 6))
        if "token_places" in staged:
            self.tokens.view(-1).index_copy_(0, staged["token_places"], staged["tokens"].int())

    def remember(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """What was sampled: `token_ids` int64 [R], none negative, for these positions of these slots."""
        self.last_tokens.index_copy_(0, slots, token_ids)
        self.tokens.view(-1).index_copy_(0, slots * self._max_tokens + positions, token_ids.int())

    def _bind(self, new: NewSequence) -> None:
        self.bindings[new.slot] = Binding(new.sampling, new.num_prompt_tokens, new.min_length, new.ending_token_ids)
        self.version += 1
        if new.sampling.num_prompt_logprobs is None:
            self.prompt_logprob_slots.discard(new.slot)
        else:
            self.prompt_logprob_slots.add(new.slot)
        self._table_lens[new.slot] = 0

    def _stage_bindings(self, by_slot: dict[int, NewSequence]) -> dict[str, np.ndarray]:
        params = [new.sampling for new in by_slot.values()]
        integers = [(new.sampling.top_k, new.sampling.seed, new.num_prompt_tokens) for new in by_slot.values()]
        floats = [
            (p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
            for p in params
        ]
        staged = {
            "new_slots": np.fromiter(by_slot.keys(), np.int64, len(by_slot)),
            "new_integers": np.array(integers, np.uint64).view(np.int64).reshape(-1),
            "new_floats": as_bits([x for row in floats for x in row]),
        }
        readers = [new for slot, new in by_slot.items() if self.bindings[slot].reads_tokens]
        if readers:
            starts = [np.arange(len(new.token_ids)) + new.slot * self._max_tokens for new in readers]
            staged["token_places"] = np.concatenate(starts)
            staged["tokens"] = np.concatenate([np.array(new.token_ids, np.int64) for new in readers])
        return staged

    def _append(self, slot: int, ids: tuple[int, ...] | list[int], places: list[int], blocks: list[int]) -> None:
        at = slot * self._max_blocks + self._table_lens[slot]
        self._table_lens[slot] += len(ids)
        if self._table_lens[slot] > self._max_blocks:
            raise ValueError(f"slot {slot} was given {self._table_lens[slot]} blocks, at most {self._max_blocks} fit")
        places.extend(range(at, at + len(ids)))
        blocks.extend(ids)
