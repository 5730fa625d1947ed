"""Chance decides: alone, or between two."""

import random
from collections.abc import Sequence

from router.fleet.policies.policy import C, Choice, Work


class RandomChoice:
    """Any worker, whatever its load."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, work: Work, candidates: Sequence[C]) -> Choice[C]:
        return Choice(self._rng.choice(candidates))


class PowerOfTwo:
    """Of two at random the one with fewer sequences. Routers that see the same stale loads do not all run to one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, work: Work, candidates: Sequence[C]) -> Choice[C]:
        two = self._rng.sample(candidates, min(2, len(candidates)))
        return Choice(min(two, key=lambda c: c.load.num_sequences))
