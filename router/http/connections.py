"""Bounds of HTTP connections, which uvicorn has none of: how many a host may have, and how long each may take to say
what it wants."""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.hosts import name_of_host
from fissile.errors import ResourceExhaustedError
from router.admission.budget import Budget
from router.http.errors import error_object, plain_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    connections: Budget
    """By host: a connection says nothing of keys."""
    receive_timeout: float
    """Seconds for the head of a request."""

    def protocol(self) -> Callable[..., H11Protocol]:
        """What uvicorn makes one of for each connection."""

        def make(*args: Any, **kwargs: Any) -> H11Protocol:
            return _BoundedConnection(self, *args, **kwargs)

        return make


class _BoundedConnection(H11Protocol):
    """From its first byte, or from the beginning of the connection, to its end, the head of a request has
    `receive_timeout`; a body has its own (`WholeBody`)."""

    def __init__(self, bounds: ConnectionBounds, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._host: str | None = None
        """Of whom a place is taken."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        host = name_of_host(self.client[0]) if self.client else "unknown"
        try:
            self._bounds.connections.take(host, 1)
        except ResourceExhaustedError as error:
            self._refuse(b"429 Too Many Requests", error_object(error))
            return
        self._host = host
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_head_timer()
        if self._host is not None:
            self._bounds.connections.give(self._host, 1)
            self._host = None

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP. An answer that is on its way cannot be taken back: the client sees it break off."""
        logger.info("a connection of %s is ended: %s", self._host, msg)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(b"400 Bad Request", plain_error("the request is no valid HTTP/1.1"))
        else:
            self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._bounds.receive_timeout, self._time_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(b"408 Request Timeout", timeout_error(self._bounds.receive_timeout))

    def _refuse(self, status: bytes, error: dict[str, Any]) -> None:
        """And hang up, whatever the client says or reads."""
        body = json.dumps(error).encode()
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()


def timeout_error(seconds: float) -> dict[str, Any]:
    return plain_error(f"the request did not come within {seconds:g} s (receive-timeout)", code="request_timeout")
