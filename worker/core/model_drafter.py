"""Drafts of a model that runs beside the one that is served, in the ranks: the scheduler only says where they go."""

from collections.abc import Sequence as Seq

from worker.core.batch import DRAFTED_TOKEN
from worker.core.sequence import Sequence


class ModelDrafter:
    """See `Drafter`. What it proposes becomes tokens where the step runs, just before it does."""

    def begin_step(self) -> None:
        pass

    def propose(self, seq: Sequence, most: int) -> Seq[int]:
        return [DRAFTED_TOKEN] * most
