"""What happens to every HTTP request before its endpoint."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.authentication import HEADER
from common.faults import log_fault, shown
from fissile.errors import ResourceExhaustedError, UnauthenticatedError
from router.admission.budget import Budget
from router.admission.turns import LARGE_BYTES
from router.callers.callers import Callers
from router.http.answers import Json
from router.http.callers import client_of, host_of, set_caller
from router.http.connections import timeout_error
from router.http.errors import error_object, headers_of, plain_error, status_of

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})
"""Asked by load balancers, which have no key."""


class FaultLog:
    """The end of the way of what nobody caught: uvicorn would log all that it says. The client has its answer, or sees
    the connection end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            log_fault(logger, error, "%s %s failed", scope["method"], shown(scope["path"]))


class Identification:
    """Finds out who calls, and answers whoever shows no key where one is wanted."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            try:
                header = dict(scope["headers"]).get(HEADER.encode(), b"")
                set_caller(scope, self._callers.identify(header, host_of(scope)))
            except UnauthenticatedError as error:
                logger.info("%s %s refused: %s", scope["method"], shown(scope["path"]), error.message)
                body = plain_error(error.message, code="invalid_api_key")
                await JSONResponse(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class BodyBounds:
    max_bytes: int
    """Of one body."""
    held_bytes: Budget
    """Of all."""
    receive_timeout: float
    """Seconds for all of a body."""


class _GoneError(Exception):
    """The client has gone."""


class _RefusedBodyError(Exception):
    """A body that will not do, and what to answer."""

    def __init__(self, status: int, error: Json, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(error["error"]["message"])
        self.status = status
        self.error = error
        self.headers = headers


SMALL_PART = 4096
"""Bytes. Smaller parts of a body are kept together, as each alone takes fifty more, which no budget counts."""


@dataclass(slots=True)
class _Body:
    """What has come of one."""

    parts: list[bytes] = field(default_factory=list)
    small: bytearray = field(default_factory=bytearray)
    """Behind them."""
    num_bytes: int = 0
    """Taken from the budget."""

    def add(self, part: bytes) -> None:
        self.num_bytes += len(part)
        if len(part) < SMALL_PART:
            self.small += part
            if len(self.small) >= SMALL_PART:
                self._gather()
        else:
            self._gather()
            self.parts.append(part)

    async def take(self) -> bytes:
        """All of it, once. To join 12 MiB takes 10 ms; a thread does it, and Python lets others run meanwhile."""
        self._gather()
        parts, self.parts = self.parts, []
        return b"".join(parts) if self.num_bytes < LARGE_BYTES else await asyncio.to_thread(b"".join, parts)

    def _gather(self) -> None:
        if self.small:
            self.parts.append(bytes(self.small))
            self.small.clear()


class WholeBody:
    """Reads the body before the app runs, which gets it by `whole_body`. Cancels the app when the client has gone."""

    def __init__(self, app: ASGIApp, bounds: BodyBounds) -> None:
        self._app = app
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, body = client_of(scope), _Body()
        try:
            await self._read(body, client, receive)
            await self._run(scope, await body.take(), receive, send)
        except _RefusedBodyError as refused:
            logger.info("%s %s refused: %s", scope["method"], shown(scope["path"]), refused)
            await JSONResponse(refused.error, refused.status, refused.headers)(scope, receive, send)
        except _GoneError:
            return
        finally:
            self._bounds.held_bytes.give(client, body.num_bytes)

    async def _read(self, body: _Body, client: str, receive: Receive) -> None:
        """Into `body`, whose bytes are taken from the budget."""
        bounds = self._bounds
        try:
            async with asyncio.timeout(bounds.receive_timeout):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    part = message.get("body", b"")
                    more = message.get("more_body", False)
                    if body.num_bytes + len(part) > bounds.max_bytes:
                        text = f"the body is longer than {bounds.max_bytes} bytes"
                        raise _RefusedBodyError(413, plain_error(text, code="body_too_long"))
                    bounds.held_bytes.take(client, len(part))
                    body.add(part)
        except TimeoutError as error:
            raise _RefusedBodyError(408, timeout_error(bounds.receive_timeout), {"connection": "close"}) from error
        except ResourceExhaustedError as error:
            raise _RefusedBodyError(status_of(error), error_object(error), headers_of(error)) from error

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        async def whole() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        app = asyncio.ensure_future(self._app(scope, whole, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((app, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            app.cancel()
            await asyncio.wait((app,))
        if not app.cancelled():
            app.result()


async def whole_body(receive: Receive) -> bytes:
    """What `WholeBody` has read; once. (Starlette's own `Request.body` makes a copy.)"""
    body: bytes = (await receive())["body"]
    return body


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
