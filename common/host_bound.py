"""How many calls may be open of services that need no key, where each lasts as long as its client likes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc

from common.hosts import host_of_peer, name_of_host
from fissile.errors import ResourceExhaustedError

REFUSAL_SECONDS = 0.01
"""Between two refusals to a host. What is refused at once is asked again at once, at a cost like that of a request."""

MAX_REFUSED = 8192
"""Calls that wait to hear of it, of all hosts: for each gRPC holds up to 64 KiB that its client has sent. Those beyond
are refused at once."""


class HostBound:
    """So many of a host, and of all hosts together. Used on one event loop."""

    def __init__(self, what: str, of_host: int, in_all: int) -> None:
        """`what` they are ("health watches"), for refusals."""
        self._what = what
        self._of_host = of_host
        self._in_all = in_all
        self._open: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        """Calls that wait to hear of it."""

    @property
    def num_open(self) -> int:
        return self._open.total()

    @asynccontextmanager
    async def entered(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """A call, for as long as the block lasts. Raises ResourceExhaustedError where there are too many, after those
        of the same host that were before it."""
        host = name_of_host(host_of_peer(context.peer()))
        if self._open[host] >= self._of_host or self.num_open >= self._in_all:
            error = ResourceExhaustedError(
                f"{self._what}: {self._open[host]} of {self._of_host} of this host are open, and {self.num_open} of "
                f"{self._in_all} in all",
                retry_after=1.0,
            )
            if self._refused.total() < MAX_REFUSED:
                with _counted(self._refused, host):
                    await asyncio.sleep(self._refused[host] * REFUSAL_SECONDS)
            raise error
        with _counted(self._open, host):
            yield


@contextmanager
def _counted(calls: Counter[str], host: str) -> Iterator[None]:
    calls[host] += 1
    try:
        yield
    finally:
        calls[host] -= 1
        if not calls[host]:
            del calls[host]
