"""The HTTP front as a part of the router's process, on its event loop."""

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fissile.errors import InvalidArgumentError
from fissile.tls import ServerTls, WatchedFiles
from router.http.connections import ConnectionBounds

logger = logging.getLogger(__name__)

RENEW_SECONDS = 2.0
"""Between looks at the certificate's files."""
IDLE_SECONDS = 65
"""A connection is kept so long without a request: longer than clients keep it, or one would be closed in their face."""

BACKLOG = 2048
"""Connections that may wait to be accepted."""
ACCEPTED_AT_ONCE = 8
"""Of these, in one turn of the event loop: those that are too many are refused some turns later, and until then take
open files. asyncio, which has one number for both, logs a traceback for each that finds none."""


class _Uvicorn(uvicorn.Server):
    """The router decides when to stop: signals are its own."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Farewell:
    """Around an app, whose answers end their connections once `is_said`: on an open one a client would ask again."""

    def __init__(self, app: ASGIApp) -> None:
        self.is_said = False
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, send_last if self.is_said else send)


class HttpServer:
    """`start`, then `stop` once, with `leave` some time before it."""

    def __init__(
        self, app: ASGIApp, bounds: ConnectionBounds, write_timeout: float, tls: ServerTls | None = None
    ) -> None:
        """`write_timeout`: seconds after which a client that takes nothing loses its connection."""
        self._app = _Farewell(app)
        self._bounds = bounds
        self._write_timeout = write_timeout
        self._tls = tls
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, close_seconds: float) -> int:
        """Listen; returns the port. Raises OSError when it is taken or the TLS files cannot be used. `close_seconds`:
        what responses have, once it stops, to be sent."""
        tls = self._tls
        config = uvicorn.Config(
            self._app,
            http=self._bounds.protocol(),  # type: ignore[arg-type]
            backlog=ACCEPTED_AT_ONCE,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level=logging.ERROR,  # what clients do is logged by us, and no upgrade is called for
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=max(1, round(close_seconds)),
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
            ssl_ca_certs=str(tls.client_ca) if tls and tls.client_ca else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca else ssl.CERT_NONE,
        )
        config.load()
        listener = _listen(host, port, self._write_timeout)
        self._server = _Uvicorn(config)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        if tls and config.ssl:
            self._renewing = asyncio.create_task(_renew_forever(tls, config.ssl))
        bound: int = listener.getsockname()[1]
        logger.info("HTTP on %s://%s:%d", "https" if tls else "http", host, bound)
        return bound

    def leave(self) -> None:
        """Clients do better to go elsewhere: each answer ends its connection."""
        self._app.is_said = True

    async def stop(self) -> None:
        """No new connections; responses that are being sent have a short time."""
        if self._renewing:
            self._renewing.cancel()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


async def _renew_forever(tls: ServerTls, context: ssl.SSLContext) -> None:
    """Files that are replaced count for the connections after that, as on gRPC; but a CA is added to the old one."""
    watched = WatchedFiles(tls.files)
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        if not watched.have_changed():
            continue
        try:
            tls.check()
            context.load_cert_chain(tls.certificate, tls.key)
            if tls.client_ca:
                context.load_verify_locations(tls.client_ca)
        except (InvalidArgumentError, OSError) as error:
            logger.error("certificates are not read again: %s", error)


def _listen(host: str, port: int, write_timeout: float) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":
            # Connections have it from their listener: the system ends one that takes nothing, or has gone, for so long.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(write_timeout * 1000)))
        listener.bind(address)
        listener.listen(BACKLOG)  # who is told the port may connect at once, before anyone accepts
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port} for HTTP: {error.strerror}") from error
    return listener
