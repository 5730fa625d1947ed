"""WorkerService: translate, delegate, end calls properly."""

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import grpc

from common.block_hash import HASH_SCHEME
from common.version import package_version
from fissile import v1
from fissile.errors import FissileError, UnavailableError, UnimplementedError
from worker.config import WorkerSettings
from worker.core.scheduler import Scheduler
from worker.engine.engine import Engine
from worker.executor.errors import ExecutorError
from worker.face.broker import Broker
from worker.face.convert_outputs import duration_to_pb, load_to_pb
from worker.face.kv_watch import min_interval, watch_kv_events
from worker.face.requirements import require
from worker.face.served_files import ServedFiles
from worker.face.streams import ExecuteStream
from worker.loader.tokenizer import TokenizerFiles
from worker.runner.config import ModelInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")

TOKENIZER_PART_BYTES = 1024 * 1024
COMMANDS_AT_A_STRETCH = 64
"""Of one message: then the event loop is others' for a while."""
LOADING = "the model is still loading"
LOAD_INTERVAL = 1.0
"""Seconds between load reports on a stream without outputs; only if the load changed."""


class RankProfiles(Protocol):
    """`worker.executor.profiles.Profiles` has the contract. Both wait."""

    def start(self, folder: str) -> None: ...

    def stop(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """What the service delegates to, once there is a model."""

    engine: Engine
    broker: Broker
    model: ModelInfo
    files: ServedFiles
    profiles: RankProfiles
    lockstep_group: str


class WorkerService(v1.WorkerServiceServicer):
    """Answers UNAVAILABLE until `attach`: the port is open while the model loads, so that probes get an answer. The
    tokenizer is told of as soon as it is known."""

    def __init__(self, settings: WorkerSettings, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        """`set_serving` says what health is to answer."""
        self._settings = settings
        self._set_serving = set_serving
        self._epoch = uuid.uuid4().hex
        self._started_at = time.monotonic()
        self._tokenizer: TokenizerFiles | None = None
        self._worker: LoadedWorker | None = None

    def offer(self, tokenizer: TokenizerFiles) -> None:
        """Before `attach`: routers can load it while the model is loaded here."""
        self._tokenizer = tokenizer

    def attach(self, worker: LoadedWorker) -> None:
        self._worker = worker

    def _loaded(self) -> LoadedWorker:
        if self._worker is None:
            raise UnavailableError(LOADING)
        return self._worker

    async def Execute(  # type: ignore[override]
        self, request_iterator: AsyncIterator[v1.ExecuteRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """Writes by itself, not as a generator: a generator that waits for a slow reader could not be ended."""
        broker = self._loaded().broker
        stream = broker.open_stream()
        receiver = sender = None
        try:
            await context.send_initial_metadata(())
            receiver = asyncio.create_task(_receive(request_iterator, stream, broker))
            sender = asyncio.create_task(self._send(stream, context))
            await asyncio.wait({sender, stream.cut}, return_when=asyncio.FIRST_COMPLETED)
            await (stream.cut if stream.is_cut else sender)
        finally:
            broker.close_stream(stream)
            for task in (receiver, sender):
                if task is not None:
                    task.cancel()
                    with suppress(asyncio.CancelledError, Exception):
                        await task

    async def _send(self, stream: ExecuteStream, context: grpc.aio.ServicerContext) -> None:
        """Until the stream is over. Between outputs, says how the load changed."""
        engine = self._loaded().engine
        last_load = v1.WorkerLoad()
        while not stream.is_over:
            response = await stream.next(LOAD_INTERVAL)
            if response is None:
                load = load_to_pb(engine.load)
                if load == last_load:
                    continue
                response = v1.ExecuteResponse(step=engine.step, load=load)
            last_load = response.load
            await context.write(response)

    async def GetWorker(self, request: v1.GetWorkerRequest, context: grpc.aio.ServicerContext) -> v1.GetWorkerResponse:
        worker, settings = self._loaded(), self._settings
        model = worker.model
        return v1.GetWorkerResponse(
            model=settings.model_names[0],
            model_aliases=settings.model_names[1:],
            architectures=[model.config.architecture],
            tokenizer_fingerprint=worker.files.tokenizer.fingerprint,
            max_model_len=model.max_model_len,
            vocab_size=model.config.vocab_size,
            block_size=model.block_size,
            num_blocks=model.num_blocks,
            hash_scheme=HASH_SCHEME,
            dp_rank=settings.dp_rank,
            dp_size=settings.dp_size,
            tp_size=settings.tensor_parallel_size,
            epoch=self._epoch,
            capabilities=_capabilities(settings, model),
            dtype=model.dtype,
            device=model.device,
            kernel_backend=", ".join(sorted(set(model.kernels.values()))),
            eos_token_ids=model.config.eos_token_ids,
            version=package_version(),
            model_fingerprint=worker.files.model_fingerprint,
            model_version=settings.model_version,
            max_num_seqs=settings.max_num_seqs,
            lockstep_group=worker.lockstep_group,
        )

    async def GetTokenizer(
        self, request: v1.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[v1.GetTokenizerResponse]:
        await context.send_initial_metadata(())
        if (tokenizer := self._tokenizer) is None:
            raise UnavailableError(LOADING)
        names = sorted(tokenizer.files)
        for name in names:
            data = tokenizer.files[name]
            for start in range(0, max(len(data), 1), TOKENIZER_PART_BYTES):
                is_last = start + TOKENIZER_PART_BYTES >= len(data)
                yield v1.GetTokenizerResponse(
                    name=name,
                    data=data[start : start + TOKENIZER_PART_BYTES],
                    sha256=hashlib.sha256(data).hexdigest() if is_last else "",
                    fingerprint=tokenizer.fingerprint if is_last and name == names[-1] else "",
                )

    async def GetLoad(self, request: v1.GetLoadRequest, context: grpc.aio.ServicerContext) -> v1.GetLoadResponse:
        engine = self._loaded().engine
        uptime = duration_to_pb(time.monotonic() - self._started_at)
        return v1.GetLoadResponse(load=load_to_pb(engine.load), step=engine.step, uptime=uptime)

    async def Drain(self, request: v1.DrainRequest, context: grpc.aio.ServicerContext) -> v1.DrainResponse:
        broker = self._loaded().broker
        timeout = self._settings.drain_timeout
        if request.HasField("timeout"):
            timeout = request.timeout.ToNanoseconds() / 1e9
            require(timeout >= 0, "timeout", f"{timeout:g} s", "0 s or more")
        result = await broker.drain(timeout, partial(self._set_serving, False))
        return v1.DrainResponse(
            num_finished=result.num_finished, num_aborted=result.num_aborted, undrained=result.is_undone
        )

    async def Undrain(self, request: v1.UndrainRequest, context: grpc.aio.ServicerContext) -> v1.UndrainResponse:
        self._loaded().broker.undrain()
        await self._set_serving(True)
        return v1.UndrainResponse()

    async def ClearPrefixCache(
        self, request: v1.ClearPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> v1.ClearPrefixCacheResponse:
        worker = self._loaded()
        num_blocks = await asyncio.wrap_future(worker.engine.call(Scheduler.clear_prefix_cache))
        worker.broker.progress.signal()
        return v1.ClearPrefixCacheResponse(num_blocks=num_blocks)

    async def WatchKvEvents(
        self, request: v1.WatchKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[v1.WatchKvEventsResponse]:
        worker = self._loaded()
        if not self._settings.reuses_prefixes(worker.model.num_groups, worker.model.num_checkpoints):
            raise UnimplementedError("prefix caching is off")
        await context.send_initial_metadata(())
        model, progress = worker.model, worker.broker.progress
        async for response in watch_kv_events(
            worker.engine, progress, model.block_size, request.from_sequence_number, min_interval(model.device)
        ):
            response.epoch = self._epoch
            yield response

    async def StartProfile(
        self, request: v1.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> v1.StartProfileResponse:
        await _profile(partial(self._loaded().profiles.start, request.output_dir))
        return v1.StartProfileResponse()

    async def StopProfile(
        self, request: v1.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> v1.StopProfileResponse:
        return v1.StopProfileResponse(path=await _profile(self._loaded().profiles.stop))


async def _profile(call: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(call)
    except ExecutorError as error:
        raise UnavailableError(str(error)) from error


async def _receive(requests: AsyncIterator[v1.ExecuteRequest], stream: ExecuteStream, broker: Broker) -> None:
    try:
        async for request in requests:
            for num_handled, command in enumerate(request.commands, start=1):
                broker.handle(stream, command)
                if num_handled % COMMANDS_AT_A_STRETCH == 0:
                    await asyncio.sleep(0)
        stream.half_close()
    except FissileError as error:
        logger.warning("a router's stream is ended: %s", error.message)
        stream.cut_with(error)
    except Exception as error:
        stream.cut_with(error)


def _capabilities(settings: WorkerSettings, model: ModelInfo) -> list[str]:
    capabilities = ["beam_search"]
    if settings.reuses_prefixes(model.num_groups, model.num_checkpoints):
        capabilities += ["prefix_caching", "kv_events"]
    if settings.swap_space_gib:
        capabilities.append("swap")
    if settings.num_drafts:
        capabilities.append("speculation")
    return capabilities
