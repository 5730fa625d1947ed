"""Drafts of a model with recurrent state, which cannot take back what it took in: it proposes in copies of its states.

Each group of its state has another one for that alone. What `follow` takes in beside the model, the state itself can
lose again, as that of any model whose rows have drafts (`worker.kernels.delta`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker.core.batch import ScheduledBatch
from worker.core.cache.pools import PoolKind
from worker.kernels.move import MOVE_ENTRIES
from worker.kernels.step import Round
from worker.kernels.transfer import to_device
from worker.runner.drafting.drafting import Drafting, DraftingParts


class RecurrentDrafting(Drafting):
    """See `Drafting`."""

    def __init__(self, parts: DraftingParts) -> None:
        super().__init__(parts)
        entries = [entry for builder in self.draft.builders for entry in builder.entry_tensors()]
        self._states = [
            entry.tensor.unflatten(0, (-1, entry.entries_per_request))
            for entry in entries
            if entry.kind is PoolKind.STATE
        ]
        """By group: first the groups, the spare one included, then a copy for each."""
        self._copies_at = len(self._states[0]) // 2
        self._kernel = parts.kernels.choose(MOVE_ENTRIES, None, torch.int64)

    def propose(self, batch: ScheduledBatch, together: Round | None) -> None:
        if batch.is_dummy or not batch.num_draft_tokens:
            return
        with self._in_copies([batch.slots[row] for row in batch.num_draft_tokens]):
            super().propose(batch, together)

    @contextmanager
    def _in_copies(self, slots: list[int]) -> Iterator[None]:
        """Meanwhile these slots have copies of their groups in place of them."""
        table = self._slots.tables.groups
        rows = to_device(torch.tensor(slots), table.device)
        groups = table.index_select(0, rows)
        copies = groups + self._copies_at
        for states in self._states:
            self._kernel.copy(states, groups, copies)
        table.index_copy_(0, rows, copies)
        yield
        table.index_copy_(0, rows, groups)
