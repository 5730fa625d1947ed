"""The open requests of this router."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from fissile.errors import AlreadyExistsError, FissileError, UnavailableError
from router.admission.budget import RETRY_AFTER_SECONDS, Budget
from router.answering.request import OpenRequest


class OpenRequests:
    """By client and id, each with the requests of its prompts. `place` takes places for as long as its block lasts,
    `add` fills them. Ids are a client's own: it learns nothing of those of others."""

    def __init__(self, places: Budget) -> None:
        self._places = places
        self._by_id: dict[tuple[str, str], Sequence[OpenRequest]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_closed = False

    def __len__(self) -> int:
        return self._places.num_taken

    @contextmanager
    def place(self, request_id: str, client: str, num_prompts: int) -> Iterator[None]:
        """For all prompts or none. Raises AlreadyExistsError, ResourceExhaustedError, UnavailableError (closed)."""
        if self._is_closed:
            raise UnavailableError("the router is shutting down", retry_after=RETRY_AFTER_SECONDS)
        key = client, request_id
        if key in self._by_id:
            raise AlreadyExistsError(f"request_id: {request_id!r} is open already")
        self._places.take(client, num_prompts)
        self._by_id[key] = ()
        self._empty.clear()
        try:
            yield
        finally:
            self._places.give(client, num_prompts)
            del self._by_id[key]
            if not self._by_id:
                self._empty.set()

    def add(self, request_id: str, client: str, requests: Sequence[OpenRequest]) -> None:
        """Into the places of that id."""
        self._by_id[client, request_id] = requests

    async def close(self, drain_timeout: float) -> None:
        """Take no more; wait for the open ones, and after the time-out end them with UNAVAILABLE."""
        self._is_closed = True
        try:
            async with asyncio.timeout(drain_timeout):
                await self._empty.wait()
        except TimeoutError:
            self.fail_all(UnavailableError("the router shut down before the request was finished"))

    def fail_all(self, error: FissileError) -> None:
        for request in chain.from_iterable(self._by_id.values()):
            request.fail(error)
