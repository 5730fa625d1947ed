"""Puts the parts together, starts them in order, and drains. The only place that knows all of them.

Start: port (health NOT_SERVING) → model → engine → a request of its own → SERVING.
Stop: NOT_SERVING → nothing new → finish or abort → server → engine → executor.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Protocol

from common.exposure import warn_if_exposed
from common.loop_lag import LoopLag
from common.metrics import new_registry, serve_metrics
from common.ports import write_port_file
from common.server import ServiceServer
from common.tracers import tracer_of
from fissile import v1
from fissile.errors import UnavailableError
from worker.config import WorkerSettings, keys_of
from worker.core.params import Grammar
from worker.core.scheduler import Scheduler
from worker.engine.engine import Engine, EngineExecutor, StepReport
from worker.engine.reports import Reports, longest_pause, output_rate
from worker.engine.watch import until_stuck
from worker.errors import WorkerFailedError
from worker.face.access import SERVICE_NAME, Access, Grant, Role
from worker.face.broker import Broker
from worker.face.convert_group import ModelLimits
from worker.face.served_files import ServedFiles
from worker.face.service import LoadedWorker, RankProfiles, WorkerService
from worker.face.warm_up import warm_up
from worker.grammars.in_use import GrammarsInUse
from worker.lap_watch import LapWatch
from worker.metrics import WorkerMetrics
from worker.runner.config import ModelInfo
from worker.threads import in_thread
from worker.traces import SequenceTraces

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""For streams to send what is queued, and for calls that never end by themselves, such as health watches."""
ENGINE_STOP_SECONDS = 10.0


class RankGrammars(Protocol):
    """`worker.executor.rank_grammars.RankGrammars` has the contract. Neither waits."""

    def compile(self, grammar: Grammar) -> "Future[None]": ...

    def release(self, grammar: Grammar) -> None: ...


class ModelExecutor(EngineExecutor, Protocol):
    """An executor with its start and end."""

    @property
    def grammars(self) -> RankGrammars: ...

    @property
    def profiles(self) -> RankProfiles: ...

    @property
    def lockstep_group(self) -> str: ...

    def start(self) -> ModelInfo: ...

    def announce_stop(self) -> None: ...

    def shutdown(self) -> None: ...


class WorkerServer:
    """`listen`, `load`, then `stop` once, even if one of them failed. `failed` is set when it cannot go on."""

    def __init__(
        self,
        settings: WorkerSettings,
        make_executor: Callable[[Callable[[], None]], ModelExecutor],
        read_files: Callable[[], ServedFiles],
    ) -> None:
        """`make_executor` is given what to call when a process of the executor has ended, from any thread."""
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._executor = make_executor(self._on_rank_end)
        self._is_executor_up = False
        self._read_files = read_files
        self._registry = new_registry()
        self._metrics = WorkerMetrics(self._registry, settings.model_names[0])
        self._tracer = tracer_of("worker", settings.otlp_traces_endpoint)
        self._service = WorkerService(settings, self._set_serving)
        self._access = _access(settings)
        self._server = ServiceServer(
            SERVICE_NAME,
            settings.server_tls(),
            admit=self._access.check,
            reflection=settings.reflection,
            channelz=settings.channelz,
        )
        self._server.serve(v1.add_WorkerServiceServicer_to_server, self._service)
        self._engine: Engine | None = None
        self._broker: Broker | None = None
        self._reports: Reports | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self._loop_lag = LoopLag(self._metrics.loop_lag.observe)
        self._watch: asyncio.Task[None] | None = None
        self.port = 0
        self.failed = asyncio.Event()
        self.failure: Exception | None = None

    async def listen(self) -> None:
        """Bind the ports. Raises UnavailableError or OSError when one is taken."""
        settings = self._settings
        self.port = await self._server.start(settings.host, settings.port)
        if settings.metrics_port is not None:
            self._stop_metrics = serve_metrics(self._registry, settings.metrics_host, settings.metrics_port)
        if settings.port_file is not None:
            write_port_file(settings.port_file, self.port)
        logger.info("listening on %s:%d, loading %s", settings.host, self.port, settings.model)
        is_open = self._access.is_open and settings.tls_client_ca is None
        warn_if_exposed(
            "gRPC",
            settings.host,
            has_tls=settings.tls_certificate is not None,
            open_to_all="drain this worker and read the tokens of all cached prompts" if is_open else "",
        )

    async def load(self) -> None:
        """Load the model and serve. Raises ModelError, ExecutorError, ConfigError or UnavailableError."""
        watch = LapWatch()
        files, model = await asyncio.gather(self._offer_files(), self._start_executor())
        watch.lap("files and ranks")
        self._engine = engine = self._make_engine(model)
        limits = ModelLimits.of(model)
        _warn_of_small_cache(limits)
        grammars = self._executor.grammars
        self._broker = Broker(
            self._engine,
            GrammarsInUse(grammars.compile, grammars.release),
            limits,
            self._metrics,
            SequenceTraces(self._tracer, self._settings.model_names[0]),
            self._settings.max_queued_messages,
        )
        self._engine.start()
        self._watch = asyncio.create_task(self._watch_engine(self._engine))
        await warm_up(self._broker, limits, self._settings.step_timeout)
        self._metrics.start(model, lambda: engine.load)
        self._loop_lag.start()
        executor = self._executor
        self._service.attach(
            LoadedWorker(engine, self._broker, model, files, executor.profiles, executor.lockstep_group)
        )
        await self._server.set_serving(True)
        watch.lap("first request")
        logger.info(
            "ready after %.1f s (%s): %s on %s", watch.seconds, watch, self._settings.model_names[0], model.device
        )

    async def _offer_files(self) -> ServedFiles:
        files = await in_thread(self._read_files)
        self._service.offer(files.tokenizer)
        return files

    async def _start_executor(self) -> ModelInfo:
        model = await in_thread(self._executor.start)
        self._is_executor_up = True
        return model

    def _make_engine(self, model: ModelInfo) -> Engine:
        groups = model.num_groups, model.num_checkpoints
        if self._settings.enable_prefix_caching and not self._settings.reuses_prefixes(*groups):
            logger.info("prefix caching is off: the state of this model's requests is not checkpointed")
        scheduler = Scheduler(
            self._settings.scheduler_config(model.max_model_len),
            self._settings.cache_config(model.num_blocks, model.num_host_blocks, *groups),
            drafter=self._settings.drafter(),
        )
        num_cores = self._settings.num_threads or len(os.sched_getaffinity(0))
        rate = output_rate(self._settings.max_output_rate, model.device, num_cores)
        self._reports = Reports(self._on_reports, rate=rate, longest=longest_pause(model.device))
        return Engine(
            scheduler,
            self._executor,
            async_depth=self._settings.async_depth,
            step_timeout=self._settings.step_timeout,
            on_report=self._reports.post,
            on_failure=lambda error: self._call_soon(lambda: self._on_failure(error)),
        )

    async def _watch_engine(self, engine: Engine) -> None:
        await until_stuck(lambda: engine.turn)
        logger.error("the engine's thread stands still in step %d", engine.step)
        self._on_failure(WorkerFailedError("the engine's thread stands still"))

    async def stop(self) -> None:
        """Drain and end everything. What still loads is left to the end of the process."""
        if self._is_executor_up:
            self._executor.announce_stop()
        if self._broker is None:
            await self._set_serving(False)
        else:
            self._broker.close()
            if num_open := self._broker.num_open:
                logger.info("draining: open sequences (%d) have %g s to finish", num_open, self._settings.drain_timeout)
            await self._broker.drain(self._settings.drain_timeout, partial(self._set_serving, False))
            self._broker.end_streams(UnavailableError("the worker is shutting down"))
        await self._server.stop(CLOSE_SECONDS)
        if self._watch is not None:
            self._watch.cancel()
        if self._engine is not None and not await in_thread(partial(self._engine.stop, ENGINE_STOP_SECONDS)):
            logger.warning("a step does not end; killing the device's processes")
        if self._is_executor_up:
            await in_thread(self._executor.shutdown)
        if self._engine is not None and (load := self._engine.load).num_draft_tokens:
            logger.info(
                "speculation: %d of %d drafts were right; rows with drafts by how many of them were: %s",
                load.num_accepted_tokens, load.num_draft_tokens, ", ".join(map(str, load.accepted_counts)),
            )  # fmt: skip
        await self._tracer.close()
        self._loop_lag.stop()
        if self._stop_metrics is not None:
            self._stop_metrics()
        logger.info("stopped")

    async def _set_serving(self, serving: bool) -> None:
        await self._server.set_serving(serving)

    def _on_reports(self, reports: Sequence[StepReport]) -> None:
        if self._broker is not None:
            self._broker.on_reports(reports)

    def _on_failure(self, error: Exception) -> None:
        """The first one counts: a thread that has ended stands still, too."""
        if self.failure is not None:
            return
        summary = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.failure = WorkerFailedError(summary)
        if self._reports is not None:
            self._reports.flush()
        if self._broker is not None:
            self._broker.fail(summary)
        self.failed.set()

    def _on_rank_end(self) -> None:
        if self._engine is not None:
            self._engine.check_executor()

    def _call_soon(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback)


def _warn_of_small_cache(limits: ModelLimits) -> None:
    num_cacheable = limits.num_blocks * limits.block_size
    if num_cacheable < limits.max_model_len:
        logger.warning(
            "the cache holds %d tokens, less than one context of %d: longer requests end early or are refused",
            num_cacheable,
            limits.max_model_len,
        )


def _access(settings: WorkerSettings) -> Access:
    return Access(
        [
            Grant(Role.ROUTER, keys_of(settings.router_key), frozenset(settings.router_names)),
            Grant(Role.OPERATOR, keys_of(settings.operator_key), frozenset(settings.operator_names)),
        ]
    )
