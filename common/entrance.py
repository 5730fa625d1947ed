"""Who is let in to a gRPC service: nobody any more once it is about to stop."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import grpc
from grpc_health.v1 import health

from common.reflection import SERVICE_NAMES as REFLECTION
from fissile.errors import UnavailableError

logger = logging.getLogger(__name__)

OPEN_SERVICES = frozenset({health.SERVICE_NAME, *REFLECTION})
"""For everybody: load balancers and tools have no key, and what these say is no secret."""

LEAVE_SECONDS = 1.0
"""At most, for those who still call a service that stops."""
QUIET_TURNS, TURN_SECONDS = 5, 0.002
"""Without a call: several looks, since where a machine has much to do calls may be later than one."""

Admit = Callable[[str, grpc.aio.ServicerContext], None]
"""Looks at who calls a method (`/package.Service/Method`), and raises a FissileError if they may not."""


def admit_all(_method: str, _context: grpc.aio.ServicerContext) -> None:
    pass


def service_of(method: str) -> str:
    """`package.Service` of `/package.Service/Method`; of what is no such name, none that there is."""
    return method.partition("/")[2].partition("/")[0]


class Entrance:
    """Of one server. `let_in` is an `Admit`."""

    def __init__(self, admit: Admit) -> None:
        self._admit = admit
        self._is_shut = False
        self._has_refused = False

    def let_in(self, method: str, context: grpc.aio.ServicerContext) -> None:
        if self._is_shut and service_of(method) not in OPEN_SERVICES:
            self._has_refused = True
            logger.info("%s refused: the service is shutting down", method)
            raise UnavailableError("the service is shutting down", retry_after=LEAVE_SECONDS)
        self._admit(method, context)

    async def shut(self) -> None:
        """Returns when nobody comes any more. What gRPC has received and no handler has taken up when its server stops
        ends with CANCELLED, which clients do not expect and do not try again."""
        self._is_shut = self._has_refused = True
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                while self._has_refused:
                    self._has_refused = False
                    for _ in range(QUIET_TURNS):
                        await asyncio.sleep(TURN_SECONDS)
