"""The routers that a client may ask: one, or several that serve the same workers and know nothing of each other.

A call goes to the router that answered last. If that one cannot be reached, or says UNAVAILABLE, before anything of the
answer was delivered, the next one is asked, each once. After that the error is the caller's: only he knows what he made
of the beginning of an answer.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fissile.address import router_target
from fissile.arguments import seconds
from fissile.errors import FissileError, InvalidArgumentError, UnavailableError
from fissile.tls import ClientTls
from fissile.v1 import generation_pb2_grpc

ANSWER_SECONDS = 5.0
"""For the headers of a stream, which a router sends at once: one that does not is stopped or cut off."""

C = TypeVar("C")
Stub = generation_pb2_grpc.GenerationServiceStub
Method = Callable[[Stub], Callable[..., Any]]
"""Of a stub, the one that begins the call."""
Metadata = Sequence[tuple[str, str]]


class Routers(Generic[C]):
    """Their channels. Each must be closed."""

    def __init__(
        self, addresses: str | Sequence[str], channel: Callable[[str, ClientTls | None], C], tls: ClientTls | None
    ) -> None:
        """`addresses`: one, or several, separated by commas where they are one string. Raises InvalidArgumentError."""
        listed = addresses.split(",") if isinstance(addresses, str) else addresses
        targets = [router_target(address.strip()) for address in listed]
        if not targets:
            raise InvalidArgumentError.of("address", "at least one router is needed")
        self.channels = [channel(target, tls) for target in targets]
        self.stubs = [Stub(channel) for channel in self.channels]
        self.current = 0
        """Which one answered last."""


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

    @property
    def is_last(self) -> bool:
        """There is no other router to ask, or no need to."""
        return self._is_answered or self._num_begun == len(self._routers.stubs)

    def first(self) -> Any:
        return self._next()

    def after(self, error: FissileError) -> Any:
        """The call on the next router, after the last one has ended with `error`; raises that if it must."""
        if self.is_last or not isinstance(error, UnavailableError):
            raise error from None
        return self._next()

    def answered(self) -> None:
        """Something of the answer was delivered. Idempotent."""
        self._is_answered = True
        self._routers.current = self._index

    def _next(self) -> Any:
        self._num_begun += 1
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return self._method(self._routers.stubs[self._index])(self._request, timeout=left, metadata=self._metadata)

    @property
    def _index(self) -> int:
        """Of the router whose call was begun last."""
        return (self._first + self._num_begun - 1) % len(self._routers.stubs)


def no_answer() -> UnavailableError:
    return UnavailableError(f"the router did not answer within {ANSWER_SECONDS:g} s")
