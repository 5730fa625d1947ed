"""Turns at making requests ready: reading, checking, tokenising. No client's wishes there may hold up another client.

Small requests go `SMALL` at a time. A large one takes a thread for up to seconds and the event loop for up to some
hundred milliseconds at a stretch, in which nothing else happens. So few of them are at it at a time, and a place stays
empty after each, for as long as others may need to catch up. In both lines clients take turns (`FairQueue`), by bytes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from router.admission.gate import Gate
from router.admission.ration import CALL, Ration

LARGE_BYTES = 64 * 1024
"""From here on a request is large."""
SMALL = 16
PAUSE_SECONDS = 0.04 / 2**20
"""For each byte. The worst that a byte costs the event loop is about as much: JSON of nothing but empty objects."""
BASE_BYTES = 1024
"""What a request costs apart from its bytes, as so many of them."""


class Turns:
    """Used on one event loop."""

    def __init__(self, num_threads: int, ration: Ration) -> None:
        """`num_threads` make requests ready; large ones leave one of them to small ones."""
        self._ration = ration
        self._small = Gate(SMALL)
        self._large = Gate(max(1, num_threads - 1))

    @property
    def num_waiting(self) -> int:
        return self._small.num_waiting + self._large.num_waiting

    @asynccontextmanager
    async def turn(self, client: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait for it; it lasts as long as the block."""
        gate = self._small if num_bytes < LARGE_BYTES else self._large
        await gate.enter(client, num_bytes + BASE_BYTES)
        try:
            await self._ration.granted(client, CALL)
            yield
        finally:
            if gate is self._small:
                gate.leave()
            else:
                asyncio.get_running_loop().call_later(num_bytes * PAUSE_SECONDS, gate.leave)

    def turn_if_large(self, client: str, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """For what costs a small request next to nothing."""
        return nullcontext() if num_bytes < LARGE_BYTES else self.turn(client, num_bytes)
