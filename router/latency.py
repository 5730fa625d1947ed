"""TTFT, TPOT, ITL and end-to-end latency: of one request, and as quantiles over a window of time.

TTFT: from arrival to the first token. TPOT: mean time per token after the first. ITL: gap between two messages with
tokens. All on this router's monotonic clock, in seconds.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fissile.v1 import LatencyQuantiles
from router.distribution import Distribution, Packed, add_counts, quantiles, subtract_counts

Clock = Callable[[], float]

WINDOW_SECONDS = 3600.0
MINUTE = 60.0


class LatencyWindow:
    """The observations of the last hour, by the second for the last minute and by the minute before.

    To observe and to read costs the same however many there were: what is complete is counted by buckets, and the whole
    hour is kept in step. A busy hour takes about 200 kB.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._ends = 0.0
        """When the second that is open does."""
        self._second = Distribution()
        self._seconds: deque[_Slice] = deque()
        self._minute_ends = 0.0
        self._minute = Distribution()
        self._minutes: deque[_Slice] = deque()
        self._in_minutes: dict[int, int] = {}
        """Counts of all `_minutes`."""

    def observe(self, seconds: float) -> None:
        now = self._clock()
        if now >= self._ends:
            self._advance(now)
        self._second.add(seconds)

    def quantiles(self, window_seconds: float = WINDOW_SECONDS) -> LatencyQuantiles:
        """Of the observations not older than the window, to the second or, of more than a minute, to the minute.
        Quantiles are within 1 % of an observed value (nearest rank); count, mean and max are exact."""
        now = self._clock()
        self._advance(now)
        slices, counts = self._within(now - window_seconds, is_long=window_seconds > MINUTE)
        num_values = sum(counts.values())
        if not num_values:
            return LatencyQuantiles()
        least, largest = min(part.min for part in slices), max(part.max for part in slices)
        p50, p90, p95, p99 = (min(max(value, least), largest) for value in quantiles(counts, (50, 90, 95, 99)))
        mean = sum(part.sum for part in slices) / num_values
        return LatencyQuantiles(count=num_values, mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=largest)

    def _within(self, since: float, *, is_long: bool) -> tuple[list[Packed], dict[int, int]]:
        """What may be as new as that, and its counts together. The open second is always in it."""
        kept = self._minutes if is_long else self._seconds
        within = [part.values for part in kept if part.ends > since]
        is_whole_hour = is_long and len(within) == len(kept)
        counts = self._in_minutes.copy() if is_whole_hour else {}
        for part in () if is_whole_hour else within:
            add_counts(counts, part)
        for part in [self._second.packed(), *([self._minute.packed()] if is_long else [])]:
            add_counts(counts, part)
            within.append(part)
        return within, counts

    def _advance(self, now: float) -> None:
        """Put away the second and the minute that are over, and forget what is too old."""
        if now < self._ends:
            return
        if self._second.counts:
            values, self._second = self._second.packed(), Distribution()
            self._seconds.append(_Slice(self._ends, values))
            self._minute.merge(values)
        self._ends = now + 1.0
        while self._seconds and self._seconds[0].ends <= now - MINUTE:
            self._seconds.popleft()
        if now < self._minute_ends:
            return
        if self._minute.counts:
            values, self._minute = self._minute.packed(), Distribution()
            self._minutes.append(_Slice(self._minute_ends, values))
            add_counts(self._in_minutes, values)
        self._minute_ends = now + MINUTE
        while self._minutes and self._minutes[0].ends <= now - WINDOW_SECONDS:
            subtract_counts(self._in_minutes, self._minutes.popleft().values)


@dataclass(frozen=True, slots=True)
class _Slice:
    ends: float
    values: Packed


@dataclass(slots=True)
class LatencyWindows:
    """The four of one router, or of its requests on one worker."""

    ttft: LatencyWindow = field(default_factory=LatencyWindow)
    tpot: LatencyWindow = field(default_factory=LatencyWindow)
    itl: LatencyWindow = field(default_factory=LatencyWindow)
    e2e: LatencyWindow = field(default_factory=LatencyWindow)


@dataclass(slots=True)
class Stopwatch:
    """Latency of one request."""

    clock: Clock = time.monotonic
    arrived: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    max_gap: float = 0.0

    def __post_init__(self) -> None:
        self.arrived = self.clock()

    def another(self) -> "Stopwatch":
        """That began when this one did and has seen nothing yet."""
        watch = Stopwatch(self.clock)
        watch.arrived = self.arrived
        return watch

    def tokens_came(self, now: float) -> float | None:
        """Note tokens of a message that came at `now`; returns the gap since the message before. None: there was none,
        or these tokens are of the same message."""
        if self.first_token is None:
            self.first_token = self.last_token = now
        if now == self.last_token:
            return None
        gap = now - self.last_token
        self.last_token = now
        self.max_gap = max(self.max_gap, gap)
        return gap

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    def tpot(self, num_tokens: int) -> float | None:
        """`num_tokens` of the longest completion."""
        if self.first_token is None or num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (num_tokens - 1)

    @property
    def elapsed(self) -> float:
        return self.clock() - self.arrived
