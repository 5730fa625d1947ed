"""One worker, at the address that was given."""

from collections.abc import AsyncIterator

from router.fleet.discovery.source import Endpoint
from router.targets import StaticTarget


class StaticSource:
    def __init__(self, target: StaticTarget) -> None:
        self.known = frozenset({Endpoint(target.address)})

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Nothing changes."""
        return
        yield
