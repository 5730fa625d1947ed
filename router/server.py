"""Puts the parts together, starts them, and drains. The only place that knows all of them."""

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from common.authentication import KeyInterceptor
from common.exposure import warn_if_exposed
from common.garbage import freeze_loaded
from common.loop_lag import LoopLag
from common.metrics import new_registry, serve_metrics
from common.ports import write_port_file
from common.server import ServiceServer, stop_event_on_signals
from common.tracers import tracer_of
from fissile.errors import UnavailableError
from fissile.v1 import add_GenerationServiceServicer_to_server
from router.admission.admission import make_admission
from router.admission.full_connections import FullConnections
from router.admission.readers import Readers
from router.answering.pacing import Pacer
from router.api import GenerationApi
from router.callers.callers import Callers
from router.callers.quotas import Quotas
from router.config import RouterSettings
from router.fleet.discovery.dns import Resolver, resolve_name
from router.fleet.discovery.sources import make_source
from router.fleet.dispatch import Dispatcher
from router.fleet.policies.catalogue import goes_by_prefix, make_policy
from router.fleet.prefixes.following import PrefixFollower
from router.fleet.prefixes.prefixes import Prefixes
from router.fleet.quarantine import Quarantine
from router.fleet.retry_budget import RetryBudget
from router.fleet.versions import VersionChoice
from router.fleet.workers import WorkerSet
from router.metrics import Gauges, RouterMetrics, WorkerGauge
from router.model.chat_template import template_of_operator
from router.model.tokenizer import TokenizerStore
from router.open_files import affordable_connections, allow_open_files
from router.open_requests import OpenRequests
from router.preparing import Preparation
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
        self._registry = new_registry()
        self._threads = ThreadPoolExecutor(max(2, settings.tokenizer_threads), thread_name_prefix="tokenizer")
        self.metrics = RouterMetrics(self._registry)
        tokenizers = TokenizerStore(self._threads, template_of_operator(settings.chat_template))
        sources = [make_source(target, resolver, settings.resolve_interval) for target in settings.targets()]
        self.workers = WorkerSet(settings, tokenizers, sources)
        self._admission = admission = make_admission(settings)
        self.open_requests = OpenRequests(admission.places)
        self.prefixes = Prefixes(settings.prefix_index_mib << 20)
        self._follower = PrefixFollower(
            self.workers, self.prefixes, self.metrics, use_events=settings.policy == "prefix"
        )
        policy = make_policy(settings.policy, self.prefixes)
        dispatcher = Dispatcher(
            self.workers, policy, settings, self.metrics, Quarantine(), RetryBudget(), admission.queue, admission.ration
        )
        self.pacer = Pacer(settings.max_message_rate, admission.ration)
        self._tracer = tracer_of("router", settings.otlp_traces_endpoint)
        preparation = Preparation(settings, VersionChoice(self.workers, settings.shares(), admission.queue))
        self.api = GenerationApi(
            settings,
            self.workers,
            preparation,
            dispatcher,
            self.open_requests,
            admission,
            self.metrics,
            self.pacer,
            Quotas(),
            self._tracer,
        )
        self.callers = Callers(settings.api_key.get_secret_value(), settings.api_key_file)
        self._server = ServiceServer(
            SERVICE_NAME,
            settings.server_tls(),
            [KeyInterceptor(self.callers.check)] if self.callers.wants_key else [],
            request_limit(settings.max_prompt_bytes),
            take=Reception(
                self.callers,
                FullConnections(settings.max_connection_calls, self.metrics.connection_became_full),
                admission.turns,
                admission.ration,
                settings.receive_timeout,
            ).take,
            returning={f"/{SERVICE_NAME}/Generate", f"/{SERVICE_NAME}/Chat"},
            options=connection_options(settings),
            reflection=settings.reflection,
            channelz=settings.channelz,
            num_listeners=num_listeners(settings.max_connections),
        )
        self._server.serve(
            add_GenerationServiceServicer_to_server,
            GenerationService(self.api, self.callers, Readers(settings.write_timeout, admission)),
        )
        self.port = 0
        self.http_port: int | None = None
        self._http: HttpServer | None = None
        self._is_stopping = False
        self._health: asyncio.Task[None] | None = None
        self._key_file: asyncio.Task[None] | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self._loop_lag = LoopLag(self.metrics.loop_lag.observe)

    async def start(self) -> int:
        """Listen; returns the port. Raises UnavailableError or OSError when a port is taken, InvalidArgumentError for
        TLS files that cannot be used."""
        settings = self._settings
        worker_tls = settings.client_tls()
        if worker_tls:
            worker_tls.credentials()  # links would report the same fault again and again
        self.port = port = await self._server.start(settings.host, settings.port)
        if settings.http_port is not None:
            self._http = http_server(settings, self.api, self.callers, lambda: self.is_ready)
            self.http_port = await self._http.start(settings.http_host, settings.http_port, CLOSE_SECONDS)
        self.metrics.watch(self._gauges)
        if settings.metrics_port is not None:
            self._stop_metrics = serve_metrics(self._registry, settings.metrics_host, settings.metrics_port)
        logger.info("listening on %s:%d; waiting for workers at %s", settings.host, port, ", ".join(settings.workers))
        self._warn_if_exposed()
        self._loop_lag.start()
        self.workers.start()
        if goes_by_prefix(settings.policy):
            self._follower.start()
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
        return self.workers.is_ready and not self._is_stopping

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
        if num_open := len(self.open_requests):
            logger.info("draining: open requests (%d) have %g s to finish", num_open, self._settings.drain_timeout)
        await self.open_requests.close(self._settings.drain_timeout)
        await self._server.stop(CLOSE_SECONDS)
        if self._http:
            await self._http.stop()
        await self._follower.close()
        await self.workers.close()
        await self._tracer.close()
        self._loop_lag.stop()
        if self._stop_metrics:
            self._stop_metrics()
        self._threads.shutdown(cancel_futures=True)
        logger.info("stopped")

    async def _follow_health(self) -> None:
        was_ready = False
        with closing(StateLog(self._tell_health)) as log:
            while True:
                is_ready = self.workers.is_ready
                if is_ready != was_ready:
                    await self._server.set_serving(is_ready)
                    log.changed(is_ready)
                    was_ready = is_ready
                    continue
                links = self.workers.links
                self.metrics.keep(links.keys(), {link.info.model for link in links.values() if link.info})
                await self.workers.wait_for_change()

    def _tell_health(self, is_ready: bool, note: str) -> None:
        if is_ready:
            logger.info("ready to serve %s%s", ", ".join(self.workers.catalogue.models), note)
        else:
            logger.warning("not ready: no healthy worker%s", note)

    def _gauges(self) -> Gauges:
        """Called by another thread."""
        workers = [
            WorkerGauge(
                link.info.model if link.info else "",
                link.version.name if link.version else "",
                link.address,
                is_available=link.is_available,
                is_ejected=not link.breaker.is_closed,
                num_open_requests=link.num_open_requests,
            )
            for link in list(self.workers.links.values())
        ]
        return Gauges(
            num_open_requests=len(self.open_requests),
            num_waiting_requests=self._admission.turns.num_waiting,
            num_queued_requests=len(self._admission.queue),
            num_waiting_streams=self.pacer.num_waiting,
            held_bytes=self._admission.held_bytes.num_taken,
            prefix_index_bytes=self.prefixes.index.num_bytes,
            workers=workers,
        )


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
        freeze_loaded()
        await stop.wait()
    finally:
        await server.stop()
