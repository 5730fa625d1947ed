"""Clients that answers are written to over gRPC. One that reads nothing for long loses its request.

HTTP needs none of this: there a reader that takes nothing holds up its connection, and the system gives up on that
(`router/http/server.py`). A gRPC client reads its connection all the time, also while one of its streams is full.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from common.calls import at_end_of_call
from fissile.errors import ResourceExhaustedError
from router.admission.admission import Admission


class StalledReaderError(ResourceExhaustedError):
    """It read nothing for too long."""


class Reader:
    """An `async with` block in which a client is written to. `begin` and `end` stand around each write: cheaper by far
    than a time-out of its own for each."""

    __slots__ = ("_readers", "limit", "since")

    def __init__(self, readers: "Readers") -> None:
        self._readers = readers
        self.limit = asyncio.timeout(None)
        self.since: float | None = None
        """When the write began that is going on."""

    async def __aenter__(self) -> Self:
        await self.limit.__aenter__()
        self._readers.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._readers.remove(self)
        try:
            await self.limit.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            text = f"nothing of the answer was read for {self._readers.timeout:g} s (write-timeout)"
            raise StalledReaderError(text) from late

    def begin(self) -> None:
        self.since = time.monotonic()

    def end(self) -> None:
        self.since = None


@dataclass(slots=True, eq=False)
class _Ending:
    """Of a call whose last message gRPC has."""

    client: str
    num_bytes: int
    since: float
    is_counted: bool = False
    """It lingers."""


class Readers:
    """Used on one event loop; looks at all that are written to a few times within `timeout` seconds."""

    def __init__(self, timeout: float, admission: Admission) -> None:
        self.timeout = timeout
        self._admission = admission
        self._readers: set[Reader] = set()
        self._endings: set[_Ending] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watched(self) -> Reader:
        """For as long as the block lasts. A write that takes too long ends the block with StalledReaderError."""
        return Reader(self)

    def add(self, reader: Reader) -> None:
        """Called by the reader."""
        self._readers.add(reader)
        self._come_back()

    def remove(self, reader: Reader) -> None:
        """Called by the reader."""
        self._readers.remove(reader)

    @contextmanager
    def lingering(self, client: str, num_bytes: int) -> Iterator[None]:
        """Around the end of such a call: gRPC keeps it, and the `num_bytes` of its last message, until the client reads
        on or goes. So it counts as a place of that client."""
        with self._admission.places.forced(client, 1), self._admission.held_bytes.forced(client, num_bytes):
            yield

    def ends(self, client: str, num_bytes: int) -> None:
        """The last message of a call, whose handler this is, goes to gRPC, and the call is over. If that takes too
        long, it lingers."""
        ending = _Ending(client, num_bytes, time.monotonic())
        self._endings.add(ending)
        at_end_of_call(partial(self._ended, ending))
        self._come_back()

    def _ended(self, ending: _Ending) -> None:
        self._endings.remove(ending)
        if ending.is_counted:
            self._admission.places.give(ending.client, 1)
            self._admission.held_bytes.give(ending.client, ending.num_bytes)

    def _count(self, ending: _Ending) -> None:
        ending.is_counted = True
        self._admission.places.force(ending.client, 1)
        self._admission.held_bytes.force(ending.client, ending.num_bytes)

    def _come_back(self) -> None:
        if self._timer is None and (self._readers or self._endings):
            self._timer = asyncio.get_running_loop().call_later(self.timeout / 4, self._look)

    def _look(self) -> None:
        self._timer = None
        now, too_old = asyncio.get_running_loop().time(), time.monotonic() - self.timeout
        for reader in self._readers:
            if reader.since is not None and reader.since < too_old:
                reader.limit.reschedule(now)
        for ending in self._endings:
            if ending.since < too_old and not ending.is_counted:
                self._count(ending)
        self._come_back()
