"""Each worker in turn."""

from collections.abc import Sequence

from router.fleet.policies.policy import C, Choice, Work


class RoundRobin:
    """By address, so that a worker that comes or goes does not shift the others' turns."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, work: Work, candidates: Sequence[C]) -> Choice[C]:
        return Choice(self.next(candidates))

    def next(self, candidates: Sequence[C]) -> C:
        """Whose turn it is."""
        after = [c for c in candidates if c.address > self._last]
        chosen = min(after or candidates, key=lambda c: c.address)
        self._last = chosen.address
        return chosen
