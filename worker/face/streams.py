"""One router's Execute stream, as the worker sees it: its open sequences, and what is on its way to it.

Used on the event loop only.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from fissile.errors import FissileError, ResourceExhaustedError
from fissile.v1 import ExecuteResponse, WorkerLoad
from worker.face.convert_outputs import pieces_of

MAX_JOINED_OUTPUTS = 1024
"""Endings in one message."""
MAX_QUEUED_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class _Queued:
    response: ExecuteResponse
    num_bytes: int
    takes_endings: bool


class ExecuteStream:
    """A bounded queue between the engine, which never waits, and a socket, which may."""

    def __init__(self, max_queued: int) -> None:
        self.engine_ids: dict[int, int] = {}
        """Open sequences: the router's id → the engine's."""
        self.last_sequence_id = 0
        """The greatest of all that came, by the router's count."""
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the stream has to end at once, whatever is still queued or being written."""
        self._max_queued = max_queued
        self._queue: deque[_Queued] = deque()
        self._num_bytes = 0
        """Of all that is queued."""
        self._changed = asyncio.Event()
        self._is_half_closed = False
        self._end: FissileError | None = None

    @property
    def is_cut(self) -> bool:
        return self.cut.done()

    def response(self, step: int, load: WorkerLoad) -> ExecuteResponse:
        """A message that says nothing of sequences yet."""
        return ExecuteResponse(step=step, load=load, last_sequence_id=self.last_sequence_id)

    def push(self, response: ExecuteResponse) -> None:
        """Queue a message. A reader too far behind has its stream cut with RESOURCE_EXHAUSTED."""
        self._push(response, takes_endings=False)

    def push_endings(self, response: ExecuteResponse) -> None:
        """Queue endings that came without a step. They share a message with those that wait before them: one request
        may bring many, and a reader is not behind because of that."""
        last = self._queue[-1] if self._queue else None
        if last is None or not last.takes_endings or len(last.response.outputs) >= MAX_JOINED_OUTPUTS:
            self._push(response, takes_endings=True)
            return
        last.response.step, last.response.last_sequence_id = response.step, response.last_sequence_id
        last.response.outputs.extend(response.outputs)
        last.response.load.CopyFrom(response.load)
        num_bytes = response.ByteSize()
        last.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _push(self, response: ExecuteResponse, *, takes_endings: bool) -> None:
        if self.is_cut:
            return
        num_bytes = response.ByteSize()
        if len(self._queue) >= self._max_queued or self._num_bytes + num_bytes > MAX_QUEUED_BYTES:
            behind = f"{len(self._queue)} messages"
            if len(self._queue) < self._max_queued:
                behind += f" of {self._num_bytes} bytes"
            self.cut_with(ResourceExhaustedError(f"the stream's reader is {behind} behind"))
            return
        self._queue.append(_Queued(response, num_bytes, takes_endings))
        self._num_bytes += num_bytes
        self._changed.set()

    def cut_with(self, error: Exception) -> None:
        """End at once with `error`. Idempotent: the first error wins."""
        if not self.is_cut:
            self._queue.clear()
            self._num_bytes = 0
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
        queued = self._queue.popleft()
        self._num_bytes -= queued.num_bytes
        return queued.response


class Messages:
    """What leaves at a time: a message to each stream that there is something for."""

    def __init__(self, step: int, load: WorkerLoad) -> None:
        self._step, self._load = step, load
        self._responses: dict[ExecuteStream, ExecuteResponse] = {}

    def to(self, stream: ExecuteStream) -> ExecuteResponse:
        """For its outputs."""
        response = self._responses.get(stream)
        if response is None:
            response = self._responses[stream] = stream.response(self._step, self._load)
        return response

    def push(self) -> None:
        """Queue all of them, those that are too large in pieces."""
        for stream, response in self._responses.items():
            for piece in pieces_of(response):
                stream.push(piece)
