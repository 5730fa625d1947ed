"""The pods behind a service of Kubernetes, by its EndpointSlices.

A pod that ends is gone at once, though it may still finish what it has. One that is not ready is not: whether it takes
requests its worker says itself, sooner than Kubernetes.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from random import Random

import httpx2

from router.fleet.discovery.kubernetes_api import ApiError, ClusterAccess, EndpointSlices, GoneError, connected
from router.fleet.discovery.kubernetes_objects import EndpointSlice
from router.fleet.discovery.outage import Outage
from router.fleet.discovery.source import Endpoint
from router.targets import KubernetesTarget

MAX_BACKOFF_SECONDS = 30.0

FAMILIES = ("IPv4", "IPv6")

Slices = dict[str, EndpointSlice]
"""By name."""


class KubernetesSource:
    known: frozenset[Endpoint] = frozenset()

    def __init__(self, target: KubernetesTarget, access: ClusterAccess, backoff: float = 0.5) -> None:
        """`backoff`: seconds before the first new attempt; doubles, with jitter."""
        self._target = target
        self._access = access
        self._backoff = backoff
        self._random = Random()

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        outage = Outage(self._target, may_come_late=False)
        delay = self._backoff
        while True:
            try:
                async for slices in self._slices():
                    outage.is_over()
                    delay = self._backoff
                    yield self._endpoints(slices)
            except (ApiError, OSError, httpx2.HTTPError) as error:
                outage.goes_on(str(error) or type(error).__name__)
            await asyncio.sleep(delay * self._random.uniform(0.5, 1))
            delay = min(MAX_BACKOFF_SECONDS, delay * 2)

    async def _slices(self) -> AsyncIterator[Slices]:
        """All slices of the service, again after each change. Ends when the version to go on from is too old."""
        async with connected(self._access) as client:
            api = EndpointSlices(client, self._access, self._namespace(), self._target.service)
            listed = await api.list()
            slices, version = {item.metadata.name: item for item in listed.items}, listed.metadata.version
            yield slices
            while True:
                try:
                    async for event in api.watch(version):
                        version = event.object.metadata.version
                        if event.type == "DELETED":
                            slices.pop(event.object.metadata.name, None)
                        elif event.type != "BOOKMARK":
                            slices[event.object.metadata.name] = event.object
                        yield slices
                except GoneError:
                    return
                await asyncio.sleep(self._backoff)

    def _namespace(self) -> str:
        return self._target.namespace or self._access.namespace

    def _endpoints(self, slices: Slices) -> frozenset[Endpoint]:
        """A pod with addresses of both families is one worker: the family that comes first alone counts."""
        family = min((part.family for part in slices.values() if part.family in FAMILIES), default="")
        tls_name = f"{self._target.service}.{self._namespace()}.svc"
        parts = [part for part in slices.values() if part.family == family]
        return frozenset(
            Endpoint(address, tls_name) for part in parts for address in _addresses(part, self._target.port)
        )


def _addresses(part: EndpointSlice, port: str) -> Iterator[str]:
    """Of a slice's pods that do not end."""
    number = port if port.isdigit() else next((str(p.port) for p in part.ports if p.name == port and p.port), "")
    for endpoint in part.endpoints if number else ():
        if not endpoint.conditions.terminating:
            host = endpoint.addresses[0]
            yield f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
