"""When the garbage collector walks through all that exists: when nobody waits for it.

Most of what a worker makes goes by reference counts; the collector is for cycles, of which there are few. Left alone,
it would walk through everything whenever the number of objects has grown by a quarter: with 10,000 requests waiting a
tenth of a second, in whichever thread made the last object, with all others kept out.
"""

import gc
import time

from common import garbage

NEVER = 1 << 30
MAX_SECONDS = 600.0
"""A worker that is never idle walks through everything this often, while the device runs a step."""


def leave_to_engine() -> None:
    """Once a worker's process is ready: only new objects are looked at by themselves."""
    garbage.freeze_loaded()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


class FullCollections:
    """Of one engine, in its thread."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def run(self) -> None:
        gc.collect()
        self._last = time.monotonic()

    def run_if_overdue(self) -> None:
        if time.monotonic() - self._last >= MAX_SECONDS:
            self.run()
