"""When a router's garbage collector walks through all that exists: when it has no requests.

With 2,000 streams that takes a third of a second of the event loop. Calls and answers go by reference counts, so little
is left that waits for it; and while objects are new, they are walked through by themselves, some milliseconds' worth at
a time.
"""

import asyncio
import gc
from collections.abc import Callable
from contextlib import suppress

from common.garbage import NEVER, FullCollections, freeze_loaded

YOUNG_OBJECTS = 2_000
"""So many new objects, and they are walked through."""
WALKS = 2
"""After so many of these, what they left is, once more."""
LOOK_SECONDS = 30.0


def leave_to_router() -> None:
    """Once a router's process is ready: only new objects are looked at by themselves."""
    freeze_loaded()
    gc.set_threshold(YOUNG_OBJECTS, WALKS, NEVER)


async def collect_when_idle(has_requests: Callable[[], bool], stop: asyncio.Event) -> None:
    """Until `stop` is set. Where few objects have stayed since the last time, there is nothing to do."""
    collections = FullCollections()
    while not stop.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await stop.wait()
        _, _, num_second_walks = gc.get_count()
        if num_second_walks and not has_requests():
            collections.run()
        collections.run_if_overdue()
