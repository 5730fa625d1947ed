"""One router's Execute stream, as the worker sees it: its open sequences, and what is on its way to it.

Used on the event loop only.
"""

import asyncio
from collections import deque

from fissile.errors import FissileError, ResourceExhaustedError
from fissile.v1 import ExecuteResponse


class ExecuteStream:
    """A bounded queue between the engine, which never waits, and a socket, which may."""

    def __init__(self, max_queued: int) -> None:
        self.engine_ids: dict[int, int] = {}
        """Open sequences: the router's id → the engine's."""
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the stream has to end at once, whatever is still queued or being written."""
        self._max_queued = max_queued
        self._queue: deque[ExecuteResponse] = deque()
        self._changed = asyncio.Event()
        self._is_half_closed = False
        self._end: FissileError | None = None

    @property
    def is_cut(self) -> bool:
        return self.cut.done()

    def push(self, response: ExecuteResponse) -> None:
        """Queue a message. A reader too far behind has its stream cut with RESOURCE_EXHAUSTED."""
        if self.is_cut:
            return
        if len(self._queue) >= self._max_queued:
            self.cut_with(ResourceExhaustedError(f"the stream's reader is {self._max_queued} messages behind"))
            return
        self._queue.append(response)
        self._changed.set()

    def cut_with(self, error: Exception) -> None:
        """End at once with `error`. Idempotent: the first error wins."""
        if not self.is_cut:
            self._queue.clear()
            self.cut.set_exception(error)
            self.cut.exception()  # mark it as seen: the handler may be gone already

    def end_with(self, error: FissileError) -> None:
        """End with `error` once what is queued was sent."""
        self._end = error
        self._changed.set()

    def half_close(self) -> None:
        """The router sends no more: end once its open sequences have ended and all was sent."""
        self._is_half_closed = True
        self._changed.set()

    @property
    def is_over(self) -> bool:
        """The router sends no more, its sequences have ended, and all was handed out."""
        return self._is_half_closed and not self.engine_ids and not self._queue and self._end is None

    async def next(self, idle_timeout: float) -> ExecuteResponse | None:
        """The next message; None after `idle_timeout` seconds without any, or when the stream is over.

        Raises the error that the stream ends with.
        """
        while not self._queue:
            if self._end is not None:
                raise self._end
            if self.is_over:
                return None
            self._changed.clear()
            try:
                async with asyncio.timeout(idle_timeout):
                    await self._changed.wait()
            except TimeoutError:
                return None
        return self._queue.popleft()
