"""Ends ranks that stand still; what becomes of it then is what becomes of a rank that is killed.

A rank says twice a second that it lives, from a thread of its own: that goes on through long kernels, collectives and
compilations, which let other threads run, and stops when the process does. So silence is no slow step. How much of it
is too much depends on what the system says of the process: stopped (SIGSTOP, a frozen container) needs no patience;
otherwise something may hold the interpreter's lock, such as the import of a large library from a slow disk.

Silence is counted in beats of the watcher: one that was stopped itself, or slept with its machine, has heard nothing
because it did not listen.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

BEAT_SECONDS = 0.5
STOPPED_BEATS = 4
SILENT_BEATS = 20


class Watched(Protocol):
    """A rank, as its link knows it."""

    @property
    def num_heard(self) -> int:
        """Messages of it."""

    @property
    def is_stopped(self) -> bool:
        """Whether the system says so."""

    def give_up(self, reason: str) -> None:
        """Kill it."""


class RankWatch:
    """From `start` to `stop`, in a thread."""

    def __init__(self, ranks: Sequence[Watched]) -> None:
        self._ranks = ranks
        self._silence = [0] * len(ranks)
        """Beats without a word, of each."""
        self._num_heard = [rank.num_heard for rank in ranks]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            self.beat()

    def beat(self) -> None:
        for number, rank in enumerate(self._ranks):
            heard = rank.num_heard
            self._silence[number] = self._silence[number] + 1 if heard == self._num_heard[number] else 0
            self._num_heard[number] = heard
            silence = self._silence[number]
            if silence >= SILENT_BEATS or (silence >= STOPPED_BEATS and rank.is_stopped):
                self._silence[number] = 0
                rank.give_up(f"stood still: nothing was heard of it for {silence * BEAT_SECONDS:g} s")
