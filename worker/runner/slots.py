"""Per-slot state that stays from step to step: block tables, last tokens, sampling parameters."""

import numpy as np
import torch
from torch import Tensor

from worker.core.batch import ScheduledBatch
from worker.core.params import SamplingParams
from worker.runner.staging import as_bits

GREEDY_TEMPERATURE = 1e-5
"""Below this a draw would be the most likely token anyway, up to overflow of logits / temperature."""


class SlotState:
    """Rows of persistent device tensors, one a slot. The host keeps what decides shapes and code paths."""

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self._max_blocks = max_blocks
        self.block_tables = torch.zeros(num_slots, max_blocks, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """Last sampled token of each slot, for `DEFERRED_TOKEN`."""
        self.integers = torch.zeros(num_slots, 2, dtype=torch.int64, device=device)
        """top_k (0 for all), seed."""
        self.floats = torch.zeros(num_slots, 3, dtype=torch.float64, device=device)
        """temperature, top_p, min_p."""
        self.sampling: list[SamplingParams] = [SamplingParams()] * num_slots
        self._table_lens = [0] * num_slots

    def stage(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """Take over the batch's news about slots; returns what `apply` needs on the device (nothing: empty)."""
        places: list[int] = []
        blocks: list[int] = []
        for new in batch.new_sequences:
            self.sampling[new.slot] = new.sampling
            self._table_lens[new.slot] = 0
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
            params = {new.slot: self.sampling[new.slot] for new in batch.new_sequences}
            staged["new_slots"] = np.fromiter(params.keys(), np.int64, len(params))
            integers = [(p.top_k, p.seed) for p in params.values()]
            staged["new_integers"] = np.array(integers, np.uint64).view(np.int64).reshape(-1)
            staged["new_floats"] = as_bits([x for p in params.values() for x in (p.temperature, p.top_p, p.min_p)])
        return staged

    def apply(self, staged: dict[str, Tensor]) -> None:
        """Bring the device tensors up to date, ordered after all earlier steps."""
        if "table_places" in staged:
            self.block_tables.view(-1).index_copy_(0, staged["table_places"], staged["table_blocks"])
        if "new_slots" in staged:
            self.integers.index_copy_(0, staged["new_slots"], staged["new_integers"].view(-1, 2))
            self.floats.index_copy_(0, staged["new_slots"], staged["new_floats"].view(torch.float64).view(-1, 3))

    def _append(self, slot: int, ids: tuple[int, ...] | list[int], places: list[int], blocks: list[int]) -> None:
        at = slot * self._max_blocks + self._table_lens[slot]
        self._table_lens[slot] += len(ids)
        if self._table_lens[slot] > self._max_blocks:
            raise ValueError(f"slot {slot} was given {self._table_lens[slot]} blocks, at most {self._max_blocks} fit")
        places.extend(range(at, at + len(ids)))
        blocks.extend(ids)
