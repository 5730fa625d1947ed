"""A circuit breaker: whether a worker's answers are such that it should get requests.

    closed ──(failures)──▶ open ──(time)──▶ half-open ──(a few good answers)──▶ closed
                             ▲                  │
                             └──(one failure)───┘

Needed because fast failure looks idle: a worker that fails all it gets at once has the least load of all. What counts
is what came of a request: its first token is good; an internal error, a death or a time-out on the way is a failure.
What is the client's (a bad field, a cancel, its deadline) is neither, and neither is a worker that is full or drains. A
request that ends without a verdict gives back its place among the few of a half-open breaker: none stays so for ever.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 5
WINDOW_SECONDS = 10
MIN_OUTCOMES, MAX_FAILED_SHARE = 20, 0.5
"""So many in the window, and this share of them failed: it opens, though some in between were good."""
OPEN_SECONDS, MAX_OPEN_SECONDS = 2.0, 60.0
"""Twice as long each time, unless it was closed for MAX_OPEN_SECONDS meanwhile."""
NUM_TRIALS = 3
"""At a time while half-open, and good ones in a row that close it."""


class Breaker:
    """Of one worker. It counts and says; `ejection.py` decides."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address, self._clock = address, clock
        self.reset()

    def reset(self) -> None:
        """Another process is at the worker's address."""
        self.reason = ""
        """Why it is not closed."""
        self._reopens_at: float | None = None
        """When it is half-open; None: it is closed."""
        self._closed_at = float("-inf")
        self._num_openings = 0
        """In close succession."""
        self._failures_in_a_row = 0
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_SECONDS)
        self._trials: set[Attempt] = set()
        self._num_good_trials = 0

    @property
    def is_closed(self) -> bool:
        return self._reopens_at is None

    @property
    def admits(self) -> bool:
        """A request may be sent."""
        if self._reopens_at is None:
            return True
        return self._clock() >= self._reopens_at and len(self._trials) < NUM_TRIALS

    @property
    def admits_at(self) -> float:
        """From when on it would, if its trials ended."""
        return self._reopens_at or 0.0

    @property
    def detail(self) -> str:
        """For people; empty when it is closed."""
        if self._reopens_at is None:
            return ""
        seconds = max(0.0, self._reopens_at - self._clock())
        return f"few requests, on trial: {self.reason}" if not seconds else f"none for {seconds:.1f} s: {self.reason}"

    def trip(self, reason: str) -> None:
        """Open it, whatever came of requests: the worker stood still. When it is there again it is on trial."""
        self._open(reason)

    def attempt(self) -> "Attempt":
        """A request is sent to the worker."""
        attempt = Attempt(self, is_trial=not self.is_closed)
        if attempt.is_trial:
            self._trials.add(attempt)
        return attempt

    def _good(self, attempt: "Attempt") -> None:
        self._end(attempt)
        if self.is_closed:
            self._failures_in_a_row = 0
            self._second().num_good += 1
        elif attempt.is_trial:
            self._num_good_trials += 1
            if self._num_good_trials >= NUM_TRIALS:
                self._close()

    def _failed(self, attempt: "Attempt") -> None:
        self._end(attempt)
        if self._reopens_at is None:
            self._failures_in_a_row += 1
            self._second().num_failed += 1
            if reason := self._reason_to_open():
                self._open(reason)
        elif attempt.is_trial and self._clock() >= self._reopens_at:
            self._open("it failed on trial")

    def _end(self, attempt: "Attempt") -> None:
        self._trials.discard(attempt)

    def _reason_to_open(self) -> str:
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            return f"{self._failures_in_a_row} requests in a row failed"
        begin = self._clock() - WINDOW_SECONDS
        seconds = [second for second in self._seconds if second.begin > begin]
        num_failed = sum(second.num_failed for second in seconds)
        num_all = num_failed + sum(second.num_good for second in seconds)
        if num_all >= MIN_OUTCOMES and num_failed >= MAX_FAILED_SHARE * num_all:
            return f"{num_failed} of {num_all} requests failed"
        return ""

    def _second(self) -> "_Second":
        """That of now."""
        begin = int(self._clock())
        if not self._seconds or self._seconds[-1].begin != begin:
            self._seconds.append(_Second(begin))
        return self._seconds[-1]

    def _open(self, reason: str) -> None:
        now = self._clock()
        if self.is_closed and now - self._closed_at > MAX_OPEN_SECONDS:
            self._num_openings = 0
        seconds = min(MAX_OPEN_SECONDS, OPEN_SECONDS * 2**self._num_openings)
        logger.warning("worker %s gets no requests for %g s: %s", self._address, seconds, reason)
        self.reason = reason
        self._reopens_at = now + seconds
        self._num_openings += 1
        self._num_good_trials = 0

    def _close(self) -> None:
        logger.info("worker %s answers well again", self._address)
        self._reopens_at, self._closed_at, self.reason = None, self._clock(), ""
        self._failures_in_a_row = 0
        self._seconds.clear()


class Attempt:
    """A request that was sent to a worker. Each method may be called at any time; `end` at last."""

    __slots__ = ("_breaker", "is_trial")

    def __init__(self, breaker: Breaker, *, is_trial: bool) -> None:
        self._breaker = breaker
        self.is_trial = is_trial
        """It was sent while the breaker was not closed."""

    def succeeded(self) -> None:
        """Once: its first token came."""
        self._breaker._good(self)

    def failed(self) -> None:
        """By a fault of the worker's, before its first token or later."""
        self._breaker._failed(self)

    def end(self) -> None:
        """It is there no more, whatever came of it."""
        self._breaker._end(self)


class _Second:
    """Outcomes of one second."""

    __slots__ = ("begin", "num_failed", "num_good")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.num_good = self.num_failed = 0
