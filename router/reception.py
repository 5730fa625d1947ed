"""How requests come in over gRPC: so many of a client at a time, in bounded time, large ones in turn.

Calls beyond that wait before anything of them is read, so they cost the event loop nothing, and what a client can make
this process hold is bounded, whatever it sends.
"""

import asyncio
from typing import Any

import grpc

from common.calls import Decode, receive
from common.hosts import host_of_peer, name_of_host
from fissile.errors import DeadlineExceededError, UnauthenticatedError
from router.admission.full_connections import FullConnections
from router.admission.gate import Gate
from router.admission.ration import Ration
from router.admission.turns import Turns
from router.callers.callers import Callers

MAX_INCOMING = 32
"""Requests of a client on their way in."""


class Reception:
    """Used on one event loop."""

    def __init__(
        self, callers: Callers, connections: FullConnections, turns: Turns, ration: Ration, timeout: float
    ) -> None:
        """`timeout`: seconds that a request has to come in once it is its turn."""
        self._callers = callers
        self._connections = connections
        self._turns = turns
        self._ration = ration
        self._timeout = timeout
        self._gates: dict[str, Gate] = {}
        """Of clients that have some on their way."""

    async def take(self, decode: Decode, context: grpc.aio.ServicerContext) -> Any:
        """The request of a call. Raises DeadlineExceededError if it does not come."""
        self._connections.begun(context)
        self._ration.call_came()
        client = self._client(context)
        gate = self._gates.get(client)
        if gate is None:
            gate = self._gates[client] = Gate(MAX_INCOMING)
        try:
            async with gate.entered(client, 1.0):
                await self._ration.granted(client, 1.0)
                raw = await self._received(context)
                async with self._turns.turn_if_large(client, len(raw)):
                    return await decode(raw)
        finally:
            if gate.is_idle:
                self._gates.pop(client, None)

    async def _received(self, context: grpc.aio.ServicerContext) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                return await receive(context)
        except TimeoutError as error:
            text = f"the request did not come within {self._timeout:g} s (receive-timeout)"
            raise DeadlineExceededError(text) from error

    def _client(self, context: grpc.aio.ServicerContext) -> str:
        """Calls without a key, where one is wanted, are of services that are open to all."""
        try:
            return self._callers.of_call(context).name
        except UnauthenticatedError:
            return name_of_host(host_of_peer(context.peer()))
