"""So many at a time. Others wait, and their clients take turns."""

import asyncio
from contextlib import AbstractAsyncContextManager

from router.admission.fair_queue import FairQueue


class Gate:
    """Used on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_free = limit
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        return self._num_free == self._limit

    def entered(self, client: str, cost: float) -> AbstractAsyncContextManager[None]:
        """While the block lasts, it is one of them. `cost`: how much of its share the client takes by it."""
        return _Entered(self, client, cost)

    async def enter(self, client: str, cost: float) -> None:
        """Exactly one `leave` must follow, unless it is cancelled."""
        if self._num_free and not self._queue:
            self._num_free -= 1
            self._queue.serve(client, cost)
            return
        passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(client, passed, cost)
        try:
            await passed
        except asyncio.CancelledError:
            if passed.cancelled():
                self._queue.remove(ticket)
            else:
                self.leave()  # it had just been let in
            raise

    def leave(self) -> None:
        self._num_free += 1
        while self._num_free and self._queue:
            passed = self._queue.pop().item
            if not passed.done():
                self._num_free -= 1
                passed.set_result(None)


class _Entered(AbstractAsyncContextManager[None]):
    __slots__ = ("_client", "_cost", "_gate")

    def __init__(self, gate: Gate, client: str, cost: float) -> None:
        self._gate = gate
        self._client = client
        self._cost = cost

    async def __aenter__(self) -> None:
        await self._gate.enter(self._client, self._cost)

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave()
