"""Which of the workers that could serve a request it may be sent to: all but the outliers."""

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from router.fleet.health.breaker import Breaker

MAX_EJECTED_SHARE = 0.5
"""If more of them fail, the fault is hardly theirs, and the others could not carry the load of all."""


class Ejectable(Protocol):
    @property
    def breaker(self) -> Breaker: ...


E = TypeVar("E", bound=Ejectable)


def admitted(candidates: Sequence[E]) -> Sequence[E]:
    """In their order; at least half of them, and so one, where there is any."""
    chosen = [candidate for candidate in candidates if candidate.breaker.admits]
    num_missing = math.ceil(len(candidates) * (1 - MAX_EJECTED_SHARE)) - len(chosen)
    if num_missing <= 0:
        return chosen
    ejected = (candidate for candidate in candidates if not candidate.breaker.admits)
    back = sorted(ejected, key=lambda candidate: candidate.breaker.admits_at)[:num_missing]
    return [candidate for candidate in candidates if candidate in chosen or candidate in back]
