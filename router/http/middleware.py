"""What happens to every HTTP request before its endpoint."""

import asyncio
import logging

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.authentication import HEADER
from common.faults import log_fault
from fissile.errors import UnauthenticatedError
from router.account import shown
from router.callers.callers import Callers
from router.http.callers import set_caller
from router.http.errors import plain_error

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
                host, _ = scope["client"] or ("unknown", 0)
                set_caller(scope, self._callers.identify(header, host))
            except UnauthenticatedError as error:
                logger.info("%s %s refused: %s", scope["method"], shown(scope["path"]), error.message)
                body = plain_error(error.message, code="invalid_api_key")
                await JSONResponse(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


class WholeBody:
    """Reads the body, of at most `limit` bytes, before the app runs, and cancels the app when the client has gone."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit:
                logger.info("%s %s refused: the body is too long", scope["method"], shown(scope["path"]))
                error = plain_error(f"the body is longer than {self._limit} bytes", code="body_too_long")
                await JSONResponse(error, 413)(scope, receive, send)
                return
        await self._run(scope, bytes(body), receive, send)

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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
