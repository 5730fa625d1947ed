"""Which worker gets a request. A policy sees candidates that can all serve it, in a fixed order, never none."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from router.fleet.load import LoadTracker


class Candidate(Protocol):
    """What a policy may look at."""

    @property
    def address(self) -> str: ...

    @property
    def load(self) -> LoadTracker: ...


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Choosing counts nothing: the caller counts the request into the load at once."""

    def choose(self, candidates: Sequence[C]) -> C: ...


class RoundRobin:
    """Each in turn, by address, so that a worker that comes or goes does not shift the others' turns."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[C]) -> C:
        ordered = sorted(candidates, key=lambda c: c.address)
        chosen = next((c for c in ordered if c.address > self._last), ordered[0])
        self._last = chosen.address
        return chosen


class LeastLoaded:
    """The one with the fewest sequences, this router's and others'; equals take turns."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, candidates: Sequence[C]) -> C:
        least = min(c.load.num_sequences for c in candidates)
        return self._turns.choose([c for c in candidates if c.load.num_sequences == least])


POLICIES: dict[str, type[RoundRobin] | type[LeastLoaded]] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded}
