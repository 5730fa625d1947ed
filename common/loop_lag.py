"""How late an event loop is, and what held it up.

All that a service answers waits while its loop is busy with something else, so lateness is measured all the time. A
thread looks at what the loop does when it is very late: afterwards nothing would tell any more.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import PurePath
from types import FrameType

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
"""Each wakes the process, which takes a fifth of a millisecond of a core where it sleeps otherwise."""
LONG_SECONDS = 1.0
"""From here on it is worth a warning."""
QUIET_SECONDS = 10.0
"""Between two warnings: a loop that has too much to do is late all the time."""
MAX_FRAMES = 4


class LoopLag:
    """`start` and `stop` on the loop; `observe` is called there, with seconds, each tick."""

    def __init__(
        self, observe: Callable[[float], None], tick_seconds: float = TICK_SECONDS, long_seconds: float = LONG_SECONDS
    ) -> None:
        self._observe = observe
        self._tick_seconds = tick_seconds
        self._long_seconds = long_seconds
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._due = 0.0
        """When the next tick should come."""
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="loop-lag", daemon=True)
        self._culprit = ""
        """What the loop did when it was long late."""
        self._warned_at = -QUIET_SECONDS

    def start(self) -> None:
        self._wait()
        self._watcher.start()

    def stop(self) -> None:
        """Idempotent; may come without a start."""
        self._stopped.set()
        if self._timer:
            self._timer.cancel()

    def _wait(self) -> None:
        self._due = time.monotonic() + self._tick_seconds
        self._timer = self._loop.call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        lag = max(0.0, now - self._due)
        self._observe(lag)
        if lag >= self._long_seconds and now - self._warned_at >= QUIET_SECONDS:
            self._warned_at = now
            logger.warning(
                "the event loop was held up for %.1f s, and with it all requests: it %s",
                lag,
                self._culprit or "was in code that let no other thread run",
            )
        self._culprit = ""
        self._wait()

    def _watch(self) -> None:
        """In a thread of its own."""
        while not self._stopped.wait(self._long_seconds / 2):
            if not self._culprit and time.monotonic() - self._due > self._long_seconds / 2:
                frame = sys._current_frames().get(self._thread_id)
                self._culprit = _place(frame) if frame else ""


def _place(frame: FrameType) -> str:
    """What the loop does: the innermost calls, the last one first. One that is late although it has nothing to do has
    not been woken."""
    if frame.f_globals.get("__name__") == "selectors":
        return "waited for its turn on a processor: the machine, or another thread, is busy"
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MAX_FRAMES, lookup_lines=False)
    calls = [f"{call.name} ({PurePath(call.filename).name}:{call.lineno})" for call in stack]
    return f"was in {', called by '.join(calls)}"
