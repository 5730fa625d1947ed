"""asyncio's event loop, with one remedy for grpc.aio.

gRPC's own thread writes a byte into a socket pair for each thing that happened (a message was written, a call came);
the loop's side reads one byte a turn, though it takes all that happened at that turn. Where things happen faster than
the loop turns, bytes pile up: each costs the loop a turn for nothing, and after some 280 the pair is full, so that
gRPC's thread stands still and new calls wait behind every message that was written before.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import HasFileno

Args = TypeVarTuple("Args")

_LOOK = socket.MSG_PEEK | socket.MSG_DONTWAIT
_MAX_BYTES = 4096


class EventLoop(asyncio.SelectorEventLoop):
    """Of a service."""

    def add_reader(self, fd: "int | HasFileno", callback: Callable[[*Args], Any], *args: *Args) -> None:
        """A socket that is watched as such (asyncio and its servers watch numbers of files) only wakes the loop: all
        its bytes that are there are one, the last of which `callback` reads."""
        if not isinstance(fd, socket.socket):
            super().add_reader(fd, callback, *args)
            return

        def wake() -> None:
            num_bytes = len(fd.recv(_MAX_BYTES, _LOOK))
            if num_bytes > 1:
                fd.recv(num_bytes - 1)
            callback(*args)

        super().add_reader(fd, wake)
