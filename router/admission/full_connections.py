"""gRPC connections that have all the calls open that they may (`max-connection-calls`).

More calls wait in the client's own gRPC, where this router knows nothing of them: no queue, no time to the first token
shows them. So it says that there may be some.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

import grpc

from common.calls import at_end_of_call
from common.hosts import host_of_peer, name_of_host

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""After a line in the log, however many connections are full."""


class FullConnections:
    """Used on one event loop."""

    def __init__(self, most: int, became_full: Callable[[], None]) -> None:
        """`most`: calls of a connection. `became_full` counts."""
        self._most = most
        self._became_full = became_full
        self._open: Counter[str] = Counter()
        """By gRPC's name for the client's end, which is one of a connection."""
        self._told_at = -QUIET_SECONDS

    def begun(self, context: grpc.aio.ServicerContext) -> None:
        """A call; its handler is running."""
        peer = context.peer()
        self._open[peer] += 1
        if self._open[peer] == self._most:
            self._became_full()
            self._tell(peer)
        at_end_of_call(lambda: self._ended(peer))

    def _ended(self, peer: str) -> None:
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]

    def _tell(self, peer: str) -> None:
        now = time.monotonic()
        if now - self._told_at < QUIET_SECONDS:
            return
        self._told_at = now
        logger.warning(
            "a connection of %s has %d calls open, all that it may (max-connection-calls): more would wait unseen in "
            "the client's gRPC; it can open another connection",
            name_of_host(host_of_peer(peer)),
            self._most,
        )
