"""Workers that step together, of which none outlives another.

When a router loses one, by whatever it notices first, the others are about to end, though they still answer: they get
nothing new for as long as they may take to notice. A worker that was cut off from this router alone has not ended, and
so the others are there after that time, and are used again.
"""

import asyncio
from collections.abc import Callable

DOUBT_SECONDS = 5.0
"""Longer than workers take to end after another one whose host is gone."""


class LockstepGroups:
    """Of one router. Groups are known by what their workers say (`GetWorkerResponse.lockstep_group`)."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change`: a group may be ending, or is not any more."""
        self._on_change = on_change
        self._ending: dict[str, asyncio.TimerHandle] = {}
        """Until when each is thought to."""

    def lost(self, group: str) -> None:
        """One of its workers is lost, or has failed. Empty: it stepped alone, which says nothing of others."""
        if not group:
            return
        is_news = group not in self._ending
        if not is_news:
            self._ending.pop(group).cancel()
        self._ending[group] = asyncio.get_running_loop().call_later(DOUBT_SECONDS, self._outlived, group)
        if is_news:
            self._on_change()

    def is_ending(self, group: str) -> bool:
        return group in self._ending

    def close(self) -> None:
        for timer in self._ending.values():
            timer.cancel()
        self._ending.clear()

    def _outlived(self, group: str) -> None:
        del self._ending[group]
        self._on_change()
