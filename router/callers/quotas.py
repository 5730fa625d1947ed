"""What callers with a quota have used of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from fissile.errors import QuotaExceededError
from router.callers.caller import Caller, Quota

MINUTE = 60.0
COUNT_SECONDS = 0.1
"""Open requests are asked so often at most what they have generated."""
OPEN_RETRY_SECONDS = 1.0
"""When to try again if too many requests are open: nobody knows when one of them ends."""


@dataclass(slots=True)
class Bucket:
    """Holds what may be used now: it fills evenly within a minute, and never holds more than a minute's worth. What was
    used beyond that is a debt, so over time nobody gets more than the rate."""

    level: float
    filled_at: float

    def missing(self, amount: float, per_minute: int, now: float) -> float:
        """Seconds until it holds so much, or, of more than it ever holds, until it is full. 0: now."""
        self.level = min(per_minute, self.level + (now - self.filled_at) * per_minute / MINUTE)
        self.filled_at = now
        return max(0.0, (min(amount, per_minute) - self.level) * MINUTE / per_minute)


@dataclass(slots=True)
class _Usage:
    """Of one caller."""

    requests: Bucket
    tokens: Bucket
    num_open: int = 0
    """Requests."""
    tabs: set["Tab"] = field(default_factory=set)
    """Of its open calls."""
    counted_at: float = 0.0

    def count(self, now: float) -> None:
        """What open requests have generated in the meantime."""
        if now - self.counted_at >= COUNT_SECONDS:
            self.counted_at = now
            for tab in self.tabs:
                tab.settle()


@dataclass(slots=True, eq=False)
class Tab:
    """What one call takes of its caller's quota."""

    _caller: Caller
    _usage: _Usage | None
    """None: the caller has no limits, and nothing is counted."""
    _clock: Callable[[], float]
    _num_generated: Callable[[], int] | None = None
    _num_settled: int = 0

    def take_prompt(self, num_tokens: int, num_generated: Callable[[], int]) -> None:
        """Before tokens are made for it. `num_generated` says how many there are so far, whenever it is asked. Raises
        QuotaExceededError."""
        per_minute = self._caller.quota.tokens_per_minute
        if self._usage is None or per_minute is None:
            return
        now = self._clock()
        self._usage.count(now)
        # A full answer may follow, so nothing begins on credit.
        _check_rate(self._usage.tokens, max(1, num_tokens), self._caller, "tokens_per_minute", per_minute, now)
        self._usage.tokens.level -= num_tokens
        self._num_generated = num_generated

    def settle(self) -> None:
        """Pay for what was generated since the last time."""
        if self._usage is not None and self._num_generated is not None:
            num_generated = self._num_generated()
            self._usage.tokens.level -= num_generated - self._num_settled
            self._num_settled = num_generated


class Quotas:
    """By name of the caller, so there are as many as there are keys with limits. One event loop, nothing waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._usages: dict[str, _Usage] = {}

    def opened(self, caller: Caller, num_requests: int = 1) -> AbstractContextManager[Tab]:
        """While its block lasts, so many requests more are open. Raises QuotaExceededError, and counts nothing, if that
        is more than the caller may have."""
        if not caller.quota.has_limits:
            return nullcontext(Tab(caller, None, self._clock))
        return self._opened(caller, num_requests)

    @contextmanager
    def _opened(self, caller: Caller, num_requests: int) -> Iterator[Tab]:
        usage = self._admitted(caller, num_requests)
        tab = Tab(caller, usage, self._clock)
        usage.tabs.add(tab)
        usage.num_open += num_requests
        try:
            yield tab
        finally:
            tab.settle()
            usage.tabs.remove(tab)
            usage.num_open -= num_requests

    def _admitted(self, caller: Caller, num_requests: int) -> _Usage:
        quota, now = caller.quota, self._clock()
        usage = self._usages.get(caller.name)
        if usage is None:
            usage = self._usages[caller.name] = _new_usage(quota, now)
        most = quota.max_open_requests
        if most is not None and usage.num_open + num_requests > most:
            raise _exceeded(caller, "max_open_requests", most, OPEN_RETRY_SECONDS)
        if quota.tokens_per_minute is not None:
            # Of who cannot pay nothing is even tokenised.
            usage.count(now)
            _check_rate(usage.tokens, 1, caller, "tokens_per_minute", quota.tokens_per_minute, now)
        if quota.requests_per_minute is not None:
            _check_rate(usage.requests, num_requests, caller, "requests_per_minute", quota.requests_per_minute, now)
            usage.requests.level -= num_requests
        return usage


def _new_usage(quota: Quota, now: float) -> _Usage:
    return _Usage(Bucket(quota.requests_per_minute or 0, now), Bucket(quota.tokens_per_minute or 0, now))


def _check_rate(bucket: Bucket, amount: int, caller: Caller, limit: str, per_minute: int, now: float) -> None:
    missing = bucket.missing(amount, per_minute, now)
    if missing > 0:
        raise _exceeded(caller, limit, per_minute, missing)


def _exceeded(caller: Caller, limit: str, value: int, retry_after: float) -> QuotaExceededError:
    return QuotaExceededError(f"key:{caller.name}", f"{limit} is {value}", retry_after)
