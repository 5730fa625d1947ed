"""What a drafter is to the scheduler."""

from collections.abc import Sequence as Seq
from typing import Protocol

from worker.core.sequence import Sequence


class Drafter(Protocol):
    """Guesses the tokens that follow those of a sequence. A wrong guess costs time and nothing else."""

    def begin_step(self) -> None:
        """A step is being planned: what `propose` may cost in all is bounded by step."""

    def propose(self, seq: Sequence, most: int) -> Seq[int]:
        """At most `most`, at least 1, tokens that may come after the committed ones of `seq`; maybe none."""
