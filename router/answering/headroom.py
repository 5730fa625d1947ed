"""How much of their rate messages may use, by what the event loop has left.

A loop that is busy all the time takes new calls up late: gRPC needs several turns of the loop for each, and a turn is
as long as all that waits in it. So messages, which can merge, leave it some time.
"""

import time
from collections.abc import Callable

MAX_BUSY = 0.7
"""Share of the loop's time, by its thread's processor time."""
LEAST = 1 / 4
_WINDOW_SECONDS = 0.1
_MEMORY = 0.8
"""Weight of the windows before the last one: steps of workers make a loop busy in lumps."""
_GROWTH = 1.05
"""A window."""


class Headroom:
    """Asked on the loop, as often as one likes."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, processor: Callable[[], float] = time.thread_time
    ) -> None:
        """Seconds of the clock, and of the processor that the loop's thread has used."""
        self._clock, self._processor = clock, processor
        self._began, self._used = clock(), processor()
        self._busy = 0.0
        self._share = 1.0

    def share(self) -> float:
        """Of the rate, from `LEAST` to 1. Falls as far as the loop is too busy, and grows again by and by."""
        now = self._clock()
        elapsed = now - self._began
        if elapsed < _WINDOW_SECONDS:
            return self._share
        used = self._processor()
        busy = (used - self._used) / elapsed
        self._began, self._used = now, used
        memory = _MEMORY ** (elapsed / _WINDOW_SECONDS)
        self._busy = memory * self._busy + (1 - memory) * busy
        change = _GROWTH if self._busy < MAX_BUSY else max(MAX_BUSY / self._busy, 1 / _GROWTH**2)
        self._share = min(1.0, max(LEAST, self._share * change))
        return self._share
