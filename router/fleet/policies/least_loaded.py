"""The worker with the fewest sequences."""

from collections.abc import Sequence

from router.fleet.policies.policy import C, Choice, Work
from router.fleet.policies.round_robin import RoundRobin


class LeastLoaded:
    """This router's sequences and others'; equals take turns."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, work: Work, candidates: Sequence[C]) -> Choice[C]:
        least = min(c.load.num_sequences for c in candidates)
        return Choice(self._turns.next([c for c in candidates if c.load.num_sequences == least]))
