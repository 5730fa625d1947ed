"""The fronts of a router around its parts: starts them, tells health, and drains."""

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from common.authentication import KeyInterceptor
from common.exposure import warn_if_exposed
from common.loop_lag import LoopLag
from common.metrics import serve_metrics
from common.ports import write_port_file
from common.server import ServiceServer
from common.signals import stop_event_on_signals
from fissile.errors import UnavailableError
from fissile.v1 import add_GenerationServiceServicer_to_server
from router.admission.full_connections import FullConnections
from router.admission.readers import Readers
from router.api import GenerationApi
from router.callers.callers import Callers
from router.config import RouterSettings
from router.fleet.discovery.dns import Resolver, resolve_name
from router.garbage import collect_when_idle, leave_to_router
from router.open_files import affordable_connections, allow_open_files
from router.parts import RouterParts
from router.reception import Reception
from router.service import GenerationService
from router.state_log import StateLog

if TYPE_CHECKING:
    from router.http.server import HttpServer

logger = logging.getLogger(__name__)

SERVICE_NAME = "fissile.v1.GenerationService"
MAX_LISTENERS = 8
LISTENER_CONNECTIONS = 256
"""At least so many are allowed to each: they are spread at random, and the bound is of each listener."""
CLOSE_SECONDS = 1.0
"""For calls other than requests, such as health watches, which never end by themselves; and for last bytes."""


class RouterServer:
    """`start`, then `stop` once, even if the start failed. Health follows whether a request would find a worker."""

    def __init__(self, settings: RouterSettings, resolver: Resolver = resolve_name) -> None:
        self._settings = settings
        self.parts = RouterParts(settings, resolver)
        self.callers = Callers(settings.api_key.get_secret_value(), settings.api_key_file)
        self._server = grpc_server(settings, self.parts, self.callers)
        self.port = 0
        self.http_port: int | None = None
        self._http: HttpServer | None = None
        self._is_stopping = False
        self._health: asyncio.Task[None] | None = None
        self._key_file: asyncio.Task[None] | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self._loop_lag = LoopLag(self.parts.metrics.loop_lag.observe)

    async def start(self) -> int:
        """Listen; returns the port. Raises UnavailableError or OSError when a port is taken, InvalidArgumentError for
        TLS files that cannot be used."""
        settings = self._settings
        worker_tls = settings.client_tls()
        if worker_tls:
            worker_tls.credentials()  # links would report the same fault again and again
        self.port = port = await self._server.start(settings.host, settings.port)
        if settings.http_port is not None:
            self._http = http_server(settings, self.parts.api, self.callers, lambda: self.is_ready)
            self.http_port = await self._http.start(settings.http_host, settings.http_port, CLOSE_SECONDS)
        if settings.metrics_port is not None:
            self._stop_metrics = serve_metrics(
                self.parts.metrics.registry, settings.metrics_host, settings.metrics_port
            )
        logger.info("listening on %s:%d; waiting for workers at %s", settings.host, port, ", ".join(settings.workers))
        self._warn_if_exposed()
        self._loop_lag.start()
        self.parts.start()
        self._health = asyncio.create_task(self._follow_health())
        self._key_file = asyncio.create_task(self.callers.follow_file())
        if settings.port_file is not None:
            write_port_file(settings.port_file, port)
        if settings.http_port_file is not None and self.http_port is not None:
            write_port_file(settings.http_port_file, self.http_port)
        return port

    def _warn_if_exposed(self) -> None:
        settings = self._settings
        has_tls = settings.tls_certificate is not None
        open_to_all = "" if self.callers.wants_key or settings.tls_client_ca else "use the models"
        warn_if_exposed("gRPC", settings.host, has_tls=has_tls, open_to_all=open_to_all)
        if self._http:
            warn_if_exposed("HTTP", settings.http_host, has_tls=has_tls, open_to_all=open_to_all)

    @property
    def is_ready(self) -> bool:
        """A request would succeed."""
        return self.parts.workers.is_ready and not self._is_stopping

    async def stop(self) -> None:
        """Not serving, nothing new, what is open may finish, then everything ends."""
        self._is_stopping = True
        if self._http:
            self._http.leave()
        for task in (self._health, self._key_file):
            if task:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        await self._server.set_serving(False)
        open_requests = self.parts.open_requests
        if num_open := len(open_requests):
            logger.info("draining: open requests (%d) have %g s to finish", num_open, self._settings.drain_timeout)
        await open_requests.close(self._settings.drain_timeout)
        await self._server.stop(CLOSE_SECONDS)
        if self._http:
            await self._http.stop()
        await self.parts.close()
        self._loop_lag.stop()
        if self._stop_metrics:
            self._stop_metrics()
        logger.info("stopped")

    async def _follow_health(self) -> None:
        was_ready, workers = False, self.parts.workers
        with closing(StateLog(self._tell_health)) as log:
            while True:
                is_ready = workers.is_ready
                if is_ready != was_ready:
                    await self._server.set_serving(is_ready)
                    log.changed(is_ready)
                    was_ready = is_ready
                    continue
                links = workers.links
                self.parts.metrics.keep(links.keys(), {link.info.model for link in links.values() if link.info})
                await workers.wait_for_change()

    def _tell_health(self, is_ready: bool, note: str) -> None:
        if is_ready:
            logger.info("ready to serve %s%s", ", ".join(self.parts.workers.catalogue.models), note)
        else:
            logger.warning("not ready: no healthy worker%s", note)


def grpc_server(settings: RouterSettings, parts: RouterParts, callers: Callers) -> ServiceServer:
    reception = Reception(
        callers,
        FullConnections(settings.max_connection_calls, parts.metrics.connection_became_full),
        parts.admission.turns,
        parts.admission.ration,
        settings.receive_timeout,
    )
    server = ServiceServer(
        SERVICE_NAME,
        settings.server_tls(),
        [KeyInterceptor(callers.check)] if callers.wants_key else [],
        request_limit(settings.max_prompt_bytes),
        take=reception.take,
        returning={f"/{SERVICE_NAME}/Generate", f"/{SERVICE_NAME}/Chat"},
        options=connection_options(settings),
        reflection=settings.reflection,
        channelz=settings.channelz,
        num_listeners=num_listeners(settings.max_connections),
    )
    service = GenerationService(parts.api, callers, Readers(settings.write_timeout, parts.admission))
    server.serve(add_GenerationServiceServicer_to_server, service)
    return server


def http_server(
    settings: RouterSettings, api: GenerationApi, callers: Callers, is_ready: Callable[[], bool]
) -> "HttpServer":
    """Raises UnavailableError if what it needs is not installed: a router without it needs none of that."""
    try:
        from router.http.app import AppConfig, build_app
        from router.http.connections import ConnectionBounds
        from router.http.middleware import BodyBounds
        from router.http.server import HttpServer
    except ModuleNotFoundError as error:
        raise UnavailableError(f"http-port needs {error.name}: pip install 'fissile[http]'") from error
    config = AppConfig(
        BodyBounds(request_limit(settings.max_prompt_bytes), api.admission.held_bytes, settings.receive_timeout),
        callers,
        allowed_origins=settings.http_allowed_origins,
    )
    bounds = ConnectionBounds(api.admission.connections, settings.receive_timeout)
    return HttpServer(build_app(api, is_ready, config), bounds, settings.write_timeout, settings.server_tls())


def num_listeners(max_connections: int) -> int:
    """Of the gRPC port. A listener takes up one call after the other, so a client that opens many at once is in the
    way of those that share its listener. Only Linux spreads connections over several."""
    return max(1, min(MAX_LISTENERS, max_connections // LISTENER_CONNECTIONS)) if sys.platform == "linux" else 1


def connection_options(settings: RouterSettings) -> dict[str, int]:
    """Of gRPC."""
    return {
        "grpc.max_allowed_incoming_connections": settings.max_connections // num_listeners(settings.max_connections),
        # gRPC takes up calls in the order in which they come, whoever sends them: what one connection may have open is
        # what it can put in front of others at once.
        "grpc.max_concurrent_streams": settings.max_connection_calls,
        # Would refuse calls of a client that keeps to the bound, while gRPC still has to free those that ended before.
        "grpc.http.overload_protection": 0,
        "grpc.max_connection_age_ms": round(settings.max_connection_age * 1000),
        "grpc.max_connection_age_grace_ms": round(settings.max_connection_age_grace * 1000),
    }


def request_limit(max_prompt_bytes: int) -> int:
    """Bytes of a request, on gRPC and HTTP. Escaped in JSON, a character may take three times its UTF-8, and a schema
    comes on top."""
    return 3 * max_prompt_bytes + 2 * 1024 * 1024


async def serve(settings: RouterSettings) -> None:
    """Until a signal comes."""
    stop = stop_event_on_signals()
    num_ports = 1 if settings.http_port is None else 2
    held = affordable_connections(settings.max_connections, num_ports, allow_open_files())
    server = RouterServer(settings.model_copy(update={"max_connections": held}))
    try:
        await server.start()
        leave_to_router()
        await collect_when_idle(lambda: len(server.parts.open_requests) > 0, stop)
    finally:
        await server.stop()
