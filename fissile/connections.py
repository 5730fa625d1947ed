"""The connections of a client to one router: a second one where the first has as many calls open as a router lets it.

What is beyond that bound (`--max-connection-calls`) waits in gRPC, behind calls that may run for minutes.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fissile.errors import FailedPreconditionError
from fissile.v1 import generation_pb2_grpc

MAX_CALLS = 100
"""Open at a time on a connection: fewer than a router lets it have, which hears of a call's end a little later."""

C = TypeVar("C")
Stub = generation_pb2_grpc.GenerationServiceStub


@dataclass(slots=True)
class _Connection(Generic[C]):
    channel: C
    stub: Stub
    num_calls: int = 0


class Place:
    """Of a call on a connection: `free` gives it back, once, and so does the end of this object. (gRPC could tell of a
    call's end, but holds the call for that, which then would not end when nobody else does.)"""

    def __init__(self, stub: Stub, free: Callable[[], None]) -> None:
        self.stub = stub
        self.free = weakref.finalize(self, free)
        self.free.atexit = False


class Connections(Generic[C]):
    """Thread-safe. One without calls stays, until gRPC lets go of what has not been used for half an hour."""

    def __init__(self, open_channel: Callable[[], C]) -> None:
        self._open_channel = open_channel
        # Reentrant: a place that nobody holds any more may end in the midst of anything.
        self._lock = threading.RLock()
        self._connections = [self._new()]
        self._is_closed = False

    def close(self) -> list[C]:
        """There are no more places. Returns the channels, which the caller closes. Idempotent."""
        with self._lock:
            self._is_closed = True
            return [connection.channel for connection in self._connections]

    def place(self) -> Place:
        """On the first connection that has room. Raises FailedPreconditionError after `close`."""
        with self._lock:
            if self._is_closed:
                raise FailedPreconditionError("the client is closed")
            connection = next((each for each in self._connections if each.num_calls < MAX_CALLS), None)
            if connection is None:
                connection = self._new()
                self._connections.append(connection)
            connection.num_calls += 1
        return Place(connection.stub, lambda: self._free(connection))

    def _free(self, connection: _Connection[C]) -> None:
        with self._lock:
            connection.num_calls -= 1

    def _new(self) -> _Connection[C]:
        channel = self._open_channel()
        return _Connection(channel, Stub(channel))
