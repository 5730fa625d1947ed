"""TTFT, TPOT, ITL and end-to-end latency: of one request, and as quantiles over a window of time.

TTFT: from arrival to the first token. TPOT: mean time per token after the first. ITL: gap between two messages with
tokens. All on this router's monotonic clock, in seconds.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from fissile.v1 import LatencyQuantiles

Clock = Callable[[], float]

WINDOW_SECONDS = 3600.0
MAX_SAMPLES = 16384
"""Per window. Beyond it the oldest go, so that memory does not depend on traffic."""


class LatencyWindow:
    """The last observations with their times, in two rings."""

    def __init__(self, clock: Clock = time.monotonic, max_samples: int = MAX_SAMPLES) -> None:
        self._clock = clock
        self._max_samples = max_samples
        self._times = array("d")
        self._values = array("d")
        self._next = 0

    def observe(self, seconds: float) -> None:
        now = self._clock()
        if len(self._values) < self._max_samples:
            self._times.append(now)
            self._values.append(seconds)
            return
        self._times[self._next] = now
        self._values[self._next] = seconds
        self._next = (self._next + 1) % self._max_samples

    def quantiles(self, window_seconds: float = WINDOW_SECONDS) -> LatencyQuantiles:
        """Of the observations not older than the window. Quantiles are observed values (nearest rank)."""
        since = self._clock() - window_seconds
        values = sorted(v for t, v in zip(self._times, self._values, strict=True) if t >= since)
        if not values:
            return LatencyQuantiles()
        return LatencyQuantiles(
            count=len(values),
            mean=sum(values) / len(values),
            p50=_nearest_rank(values, 50),
            p90=_nearest_rank(values, 90),
            p95=_nearest_rank(values, 95),
            p99=_nearest_rank(values, 99),
            max=values[-1],
        )


def _nearest_rank(ordered: list[float], percent: int) -> float:
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


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
