"""The garbage collector of a process that serves: what the process is made of is not walked through again and again.

Most of what a service makes goes by reference counts; the collector is for cycles, of which there are few. Left alone,
it would walk through everything whenever the number of objects has grown by a quarter: tenths of a second in which
nobody else has a turn. So a service chooses when.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 10_000
"""So many new objects, and the new ones are walked through."""
NEVER = 1 << 30
"""As a threshold."""
MAX_SECONDS = 600.0
"""A service that is never idle walks through everything this often."""


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """What is made within is walked through neither then nor later: of a large import a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_loaded() -> None:
    """Once a process is ready: what there is stays, and only what comes later is walked through."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


class FullCollections:
    """Of one service, in one thread."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def run(self) -> None:
        gc.collect()
        self._last = time.monotonic()

    def run_if_overdue(self) -> None:
        if time.monotonic() - self._last >= MAX_SECONDS:
            self.run()
