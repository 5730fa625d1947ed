"""Whether the engine's thread goes on. It ends the worker by itself when it fails, but cannot when it stands still."""

import asyncio
from collections.abc import Callable

BEAT_SECONDS = 1.0
STUCK_BEATS = 5
"""A turn of its loop takes milliseconds of its own work. The same beats tell that the event loop lives, so a process
that was stopped as a whole is not mistaken for a stuck thread."""


async def until_stuck(turn: Callable[[], int | None]) -> None:
    """Returns once `turn` (`Engine.turn`) has been the same for STUCK_BEATS."""
    last, num_beats = turn(), 0
    while num_beats < STUCK_BEATS:
        await asyncio.sleep(BEAT_SECONDS)
        now = turn()
        num_beats = num_beats + 1 if now is not None and now == last else 0
        last = now
