"""The open requests of this router."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import AlreadyExistsError, FissileError, ResourceExhaustedError, UnavailableError
from router.refusals import RETRY_AFTER_SECONDS
from router.request import OpenRequest


class OpenRequests:
    """By id. `place` takes a place for as long as its block lasts, `add` fills it."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._by_id: dict[str, OpenRequest | None] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def place(self, request_id: str) -> Iterator[None]:
        """Raises AlreadyExistsError, ResourceExhaustedError, UnavailableError (closed)."""
        if self._is_closed:
            raise UnavailableError("the router is shutting down", retry_after=RETRY_AFTER_SECONDS)
        if request_id in self._by_id:
            raise AlreadyExistsError(f"request_id: {request_id!r} is open already")
        if len(self._by_id) >= self._max_open:
            raise ResourceExhaustedError(
                f"{self._max_open} requests are open, the most this router takes", retry_after=RETRY_AFTER_SECONDS
            )
        self._by_id[request_id] = None
        self._empty.clear()
        try:
            yield
        finally:
            del self._by_id[request_id]
            if not self._by_id:
                self._empty.set()

    def add(self, request: OpenRequest) -> None:
        """Into the place of its id."""
        self._by_id[request.spec.request_id] = request

    async def close(self, drain_timeout: float) -> None:
        """Take no more; wait for the open ones, and after the time-out end them with UNAVAILABLE."""
        self._is_closed = True
        try:
            async with asyncio.timeout(drain_timeout):
                await self._empty.wait()
        except TimeoutError:
            self.fail_all(UnavailableError("the router shut down before the request was finished"))

    def fail_all(self, error: FissileError) -> None:
        for request in self._by_id.values():
            if request is not None:
                request.fail(error)
