"""All addresses of a name.

Answers of DNS flap: a server is away or has forgotten the name, or it tells some of many addresses, others each time.
So an answer without addresses is none, and an address is gone once several answers in a row do not have it. Until then
the worker's own health says whether it takes requests.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from router.fleet.discovery.outage import Outage
from router.fleet.discovery.source import Endpoint
from router.targets import DnsTarget

MAX_MISSES = 3
"""Answers in a row without an address, until it is gone."""

Resolver = Callable[[str], Awaitable[list[str]]]
"""All addresses of `host:port`, each as `host:port`. Raises OSError, and UnicodeError for what cannot be a name."""


async def resolve_name(name: str) -> list[str]:
    """The `Resolver` of this machine."""
    host, _, port = name.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


class DnsSource:
    known: frozenset[Endpoint] = frozenset()

    def __init__(self, target: DnsTarget, resolver: Resolver, interval: float) -> None:
        """`interval`: seconds between questions."""
        self._target = target
        # Certificates name the service; its addresses come and go.
        self._tls_name = target.name.rpartition(":")[0]
        self._resolver = resolver
        self._interval = interval
        self._misses: dict[str, int] = {}
        """Answers since an address was in one."""

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        outage = Outage(self._target, may_come_late=True)
        while True:
            try:
                found = await self._resolver(self._target.name)
            except (OSError, UnicodeError) as error:
                outage.goes_on(f"cannot resolve the name: {error}")
            else:
                if found:
                    outage.is_over()
                    self._count(found)
                    yield frozenset(Endpoint(address, self._tls_name) for address in self._misses)
                else:
                    outage.goes_on("the name has no address")
            await asyncio.sleep(self._interval)

    def _count(self, found: list[str]) -> None:
        misses = {address: num + 1 for address, num in self._misses.items() if num + 1 < MAX_MISSES}
        self._misses = {**misses, **dict.fromkeys(found, 0)}
