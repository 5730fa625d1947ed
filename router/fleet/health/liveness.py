"""Whether a connected worker lives.

Two questions, since a process may answer and do nothing, and a long step is no death:

- Its process: while messages come, it lives. When none has come for a while it is asked, and three questions in a row
  without an answer mean that it is stopped, hangs, or cannot be reached. Unanswered questions are counted, not seconds:
  a router that was stopped itself, or whose machine slept, has missed one answer at most, and loses no worker.
- Its engine: a worker owes an ending for each sequence that it was sent, also for one that was aborted. One that owes
  some and neither makes a step nor ends any for `silence_timeout` is given up, whatever it answers, and though its
  requests may have left it by then. That takes so long because a first compilation, or a long prompt on a slow CPU,
  takes tens of seconds. What can be known earlier the worker knows best, and ends by itself: a rank or an engine that
  stands still.
"""

import asyncio
import time
from collections.abc import Callable

import grpc

from fissile.v1 import GetLoadRequest, GetLoadResponse, WorkerServiceStub
from router.config import RouterSettings

MAX_UNANSWERED = 3


class WorkerStuckError(Exception):
    """The worker is there and does nothing: as good as dead."""


class Liveness:
    """Of one connection."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._heard_at = self._progress_at = time.monotonic()
        self._step = 0
        self._num_owed = 0
        """Endings."""

    def sent(self, num_sequences: int) -> None:
        if not self._num_owed:
            self._progress_at = time.monotonic()
        self._num_owed += num_sequences

    def heard(self, step: int, num_endings: int, now: float) -> None:
        """Anything; `step` is how many steps the worker had made then."""
        self._heard_at = now
        self._num_owed -= num_endings
        if num_endings or step != self._step:
            self._step, self._progress_at = step, now

    async def watch(self, stub: WorkerServiceStub, on_load: Callable[[GetLoadResponse], None]) -> None:
        """Until WorkerStuckError. A quiet worker is asked for its load, which others may change, and which goes to
        `on_load`."""
        settings, num_unanswered = self._settings, 0
        while True:
            quiet = time.monotonic() - self._heard_at
            if quiet < settings.load_interval:
                num_unanswered = 0
                await asyncio.sleep(settings.load_interval - quiet)
            elif not await self._ask(stub, on_load):
                num_unanswered += 1
            if num_unanswered == MAX_UNANSWERED:
                raise WorkerStuckError(f"nothing was heard of it for {time.monotonic() - self._heard_at:.1f} s")
            without_step = time.monotonic() - self._progress_at
            if self._num_owed > 0 and without_step > settings.silence_timeout:
                raise WorkerStuckError(f"no step for {without_step:.1f} s")

    async def _ask(self, stub: WorkerServiceStub, on_load: Callable[[GetLoadResponse], None]) -> bool:
        """Takes `probe_timeout` when there is no answer, whatever the reason."""
        begin = time.monotonic()
        try:
            response = await stub.GetLoad(GetLoadRequest(), timeout=self._settings.probe_timeout)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(self._settings.probe_timeout - (time.monotonic() - begin))
            return False
        self.heard(response.step, 0, time.monotonic())
        on_load(response)
        return True
