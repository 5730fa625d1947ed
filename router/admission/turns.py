"""Turns at making requests ready: reading, checking, tokenising. No client's wishes there may hold up another client.

Small requests go `SMALL` at a time. A large one takes a thread for up to seconds and the event loop for up to some
hundred milliseconds at a stretch, in which nothing else happens. So few of them are at it at a time, and a place stays
empty after each, for as long as others may need to catch up. In both lines clients take turns (`FairQueue`), by bytes.
"""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

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

    def turn(self, client: str, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """Wait for it; it lasts as long as the block."""
        return _Turn(self._small if num_bytes < LARGE_BYTES else self._large, self._ration, client, num_bytes)

    def turn_if_large(self, client: str, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """For what costs a small request next to nothing."""
        return nullcontext() if num_bytes < LARGE_BYTES else self.turn(client, num_bytes)


class _Turn(AbstractAsyncContextManager[None]):
    __slots__ = ("_client", "_gate", "_num_bytes", "_ration")

    def __init__(self, gate: Gate, ration: Ration, client: str, num_bytes: int) -> None:
        self._gate = gate
        self._ration = ration
        self._client = client
        self._num_bytes = num_bytes

    async def __aenter__(self) -> None:
        await self._gate.enter(self._client, self._num_bytes + BASE_BYTES)
        try:
            await self._ration.granted(self._client, CALL)
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._num_bytes < LARGE_BYTES:
            self._gate.leave()
        else:
            asyncio.get_running_loop().call_later(self._num_bytes * PAUSE_SECONDS, self._gate.leave)
