"""How many calls may be open of services that need no key, where each lasts as long as its client likes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from common.hosts import host_of_peer, name_of_host
from fissile.errors import ResourceExhaustedError


class HostBound:
    """So many of a host, and of all hosts together. Used on one event loop."""

    def __init__(self, what: str, of_host: int, in_all: int) -> None:
        """`what` they are ("health watches"), for refusals."""
        self._what = what
        self._of_host = of_host
        self._in_all = in_all
        self._open: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return self._open.total()

    @contextmanager
    def entered(self, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """A call, for as long as the block lasts. Raises ResourceExhaustedError where there are too many."""
        host = name_of_host(host_of_peer(context.peer()))
        if self._open[host] >= self._of_host or self.num_open >= self._in_all:
            raise ResourceExhaustedError(
                f"{self._what}: {self._open[host]} of {self._of_host} of this host are open, and {self.num_open} of "
                f"{self._in_all} in all",
                retry_after=1.0,
            )
        self._open[host] += 1
        try:
            yield
        finally:
            self._open[host] -= 1
            if not self._open[host]:
                del self._open[host]
