"""How many requests may be tried again and again, so that retries cannot multiply an outage.

A request's first move costs nothing: what a lost worker had goes on elsewhere, however much that is. Whoever moves
again without a token in between is a repeat, and repeats together may be a share of the requests that come, and a few
more. So in an outage a request is sent little more than twice, where each could be sent `max_retries` times.
"""

import time
from collections.abc import Callable

SHARE = 0.2
"""Repeats that each new request allows."""
PER_SECOND = 10.0
"""That are allowed in any case."""
MAX_SAVED = 100.0


class RetryBudget:
    """One per router."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._saved, self._at = MAX_SAVED, clock()

    def request_begins(self) -> None:
        self._saved = min(MAX_SAVED, self._saved + SHARE)

    def spend(self) -> bool:
        """A request is to be tried again; whether there is room for it."""
        now = self._clock()
        self._saved = min(MAX_SAVED, self._saved + (now - self._at) * PER_SECOND)
        self._at = now
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
