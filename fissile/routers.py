"""The routers that a client may ask: one, or several that serve the same workers and know nothing of each other.

A call goes to the router that answered last. If that one cannot be reached, or says UNAVAILABLE, before anything of the
answer was delivered, the next one is asked, each once. After that the error is the caller's: only he knows what he made
of the beginning of an answer.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from fissile.address import router_target
from fissile.arguments import entries, seconds, wrong
from fissile.connections import Connections, Place, Stub
from fissile.errors import FissileError, InvalidArgumentError, UnavailableError
from fissile.tls import ClientTls

ANSWER_SECONDS = 5.0
"""For the headers of a stream, which a router sends within a second: one that does not is stopped or cut off."""

C = TypeVar("C")
Method = Callable[[Stub], Callable[..., Any]]
"""Of a stub, the one that begins the call."""
Metadata = Sequence[tuple[str, str]]


class Routers(Generic[C]):
    """Their connections; `close` them."""

    def __init__(
        self, addresses: str | Sequence[str], channel: Callable[[str, ClientTls | None], C], tls: ClientTls | None
    ) -> None:
        """`addresses`: one, or several, separated by commas where they are one string. Raises InvalidArgumentError."""
        listed = addresses.split(",") if isinstance(addresses, str) else entries("address", addresses)
        for address in listed:
            if not isinstance(address, str):
                raise wrong("address", address, "a text")
        targets = [router_target(address.strip()) for address in listed]
        if not targets:
            raise InvalidArgumentError.of("address", "at least one router is needed")
        self.connections = [Connections(partial(channel, target, tls)) for target in targets]
        self.current = 0
        """Which one answered last."""

    def close(self) -> list[C]:
        """No call begins any more. Returns the channels, which the caller closes. Idempotent."""
        return [channel for connections in self.connections for channel in connections.close()]


class Calls:
    """Of one request: on one router after the other, until one answers."""

    def __init__(
        self, routers: Routers[Any], method: Method, request: Any, timeout: float | None, metadata: Metadata
    ) -> None:
        self._routers, self._method = routers, method
        self._request, self._metadata = request, metadata
        self._deadline = None if timeout is None else time.monotonic() + seconds("timeout", timeout)
        self._first = routers.current
        self._num_begun = 0
        self._is_answered = False
        self._place: Place | None = None

    @property
    def is_last(self) -> bool:
        """There is no other router to ask, or no need to."""
        return self._is_answered or self._num_begun == len(self._routers.connections)

    def first(self) -> Any:
        return self._next()

    def after(self, error: FissileError) -> Any:
        """The call on the next router, after the last one has ended with `error`; raises that if it must."""
        self.ended()
        if self.is_last or not isinstance(error, UnavailableError):
            raise error from None
        return self._next()

    def ended(self) -> None:
        """There is nothing more to come. Idempotent; the end of this object does the same."""
        if self._place is not None:
            self._place.free()

    def answered(self) -> None:
        """Something of the answer was delivered. Idempotent."""
        self._is_answered = True
        self._routers.current = self._index

    def _next(self) -> Any:
        self._num_begun += 1
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        self._place = self._routers.connections[self._index].place()
        return self._method(self._place.stub)(self._request, timeout=left, metadata=self._metadata)

    @property
    def _index(self) -> int:
        """Of the router whose call was begun last."""
        return (self._first + self._num_begun - 1) % len(self._routers.connections)


def no_answer() -> UnavailableError:
    return UnavailableError(f"the router did not answer within {ANSWER_SECONDS:g} s")
