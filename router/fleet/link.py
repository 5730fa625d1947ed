"""One worker: connect, learn what it is, keep one Execute stream, watch whether it lives, reconnect.

While the stream lives, its sequences are known here by id. When it breaks, for whatever reason, all of them are lost at
once (the worker aborts them, too), and the link starts afresh: what comes back may be another process.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fissile.channel import MAX_MESSAGE_BYTES, aio_channel
from fissile.errors import (
    FissileError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
    from_rpc_error,
    is_of_tls,
)
from fissile.tls import ClientTls
from fissile.v1 import (
    ExecuteRequest,
    ExecuteResponse,
    GetLoadResponse,
    GetWorkerRequest,
    GetWorkerResponse,
    SequenceGroup,
    WorkerServiceStub,
)
from router.answering.hop import Sink
from router.config import RouterSettings
from router.fleet.endings import is_alive_after, until_first_ends
from router.fleet.health.breaker import Attempt, Breaker
from router.fleet.health.liveness import Liveness, WorkerStuckError
from router.fleet.health.lockstep import LockstepGroups
from router.fleet.load import LoadTracker
from router.fleet.outbox import MAX_COMMAND_BYTES, Outbox
from router.fleet.preparation import Preparation
from router.fleet.sequences import OpenSequences
from router.fleet.session import Session
from router.latency import LatencyWindows
from router.model.served import Version
from router.model.tokenizer import Tokenizer, TokenizerStore
from router.state_log import StateLog

logger = logging.getLogger(__name__)

MAX_BACKOFF_SECONDS = 1.0
MAX_OUTBOX_BYTES = MAX_MESSAGE_BYTES
"""On their way to a worker that does not read them; aborts go beyond it."""
OUTPUTS_PER_TURN = 64
"""Of the event loop."""


class LinkLostError(Exception):
    """The link ended; the text says why."""


class WorkerLink:
    """`run` is one long task; the other methods are called on the same event loop and never wait."""

    def __init__(
        self,
        address: str,
        tokenizers: TokenizerStore,
        settings: RouterSettings,
        tls: ClientTls | None,
        groups: LockstepGroups,
        on_change: Callable[[], None],
    ) -> None:
        self.address = address
        self.session = Session(address, 0)
        self.load = LoadTracker()
        self.latency = LatencyWindows()
        self.breaker = Breaker(address)
        self.info: GetWorkerResponse | None = None
        """Of the last connection, as is `session`; kept while disconnected."""
        self.tokenizer: Tokenizer | None = None
        self.version: Version | None = None
        self.stub: WorkerServiceStub | None = None
        """Of the connection; None: there is none."""
        self.detail = "not connected yet"
        """Why it is not available; empty when it is."""
        self.is_retired = False
        self.is_new = True
        """It is not known yet whether the worker can be reached, and what it serves."""
        self._preparation = Preparation(address, tokenizers, settings, tls)
        self._settings = settings
        self._tls = tls
        self._groups = groups
        self._on_change = on_change
        self._connected = False
        self._serving = False
        self._sequences = OpenSequences()
        self._next_id = 1
        self._outbox = Outbox()
        self._liveness = Liveness(self._settings)

    @property
    def is_available(self) -> bool:
        """Takes new sequences."""
        return self._connected and self._serving and not self.is_retired and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """One that it steps together with is lost."""
        return self._groups.is_ending(self.session.lockstep_group)

    @property
    def num_open_requests(self) -> int:
        """Of this router."""
        return len(self._sequences.sinks)

    @property
    def has_room(self) -> bool:
        """For a newcomer: it would reach the worker now, and soon be computed."""
        return self.load.has_room and self._outbox.num_bytes < MAX_OUTBOX_BYTES

    def set_retired(self, is_retired: bool) -> None:
        """Retired: take nothing new; what runs may finish."""
        if is_retired != self.is_retired:
            self.is_retired = is_retired
            self._on_change()

    def attempt(self) -> Attempt:
        """A request is sent here; its outcome counts for the worker or against it."""
        return self.breaker.attempt()

    def start(self, group: SequenceGroup, sink: Sink, num_cached_tokens: int) -> list[int]:
        """Send a group and count its sequences into the load at once; returns the ids they got, which are set in
        `group`, too. `num_cached_tokens`: of its prompt, that need not be computed. Raises InvalidArgumentError, and
        sends nothing, if it is larger than a message."""
        ids = list(range(self._next_id, self._next_id + len(group.sequences)))
        for sequence_id, sequence in zip(ids, group.sequences, strict=True):
            sequence.id = sequence_id
        size = group.ByteSize()
        if size > MAX_COMMAND_BYTES:
            raise InvalidArgumentError(
                f"the request is too large: {size} bytes with its tokens so far, and {MAX_COMMAND_BYTES} reach a worker"
            )
        self._next_id += len(ids)
        self._sequences.add(group, sink, time.monotonic())
        num_tokens = len(group.prompt_token_ids) + sum(len(sequence.token_ids) for sequence in group.sequences)
        self.load.opened(ids, num_tokens - num_cached_tokens)
        self._outbox.start(group, size)
        self._liveness.sent(len(ids))
        return ids

    def abort(self, sequence_id: int) -> None:
        """End a sequence; its sink hears no more. Does nothing when it has ended."""
        if self._sequences.forget(sequence_id):
            self.load.closed(sequence_id)
            self._outbox.abort(sequence_id)

    async def run(self) -> None:
        """Until cancelled."""
        backoff = self._settings.reconnect_backoff
        while True:
            worker_died = is_refused = has_answered = False
            try:
                async with aio_channel(self.address, self._tls) as channel:
                    await self._session(channel)
            except grpc.aio.AioRpcError as error:
                lost = from_rpc_error(error)
                detail = lost.message
                is_refused = isinstance(lost, (UnauthenticatedError, PermissionDeniedError))
                has_answered = is_alive_after(error)
                worker_died = not has_answered
            except WorkerStuckError as error:
                detail, worker_died = str(error), True
                self.breaker.trip(detail)
            except (LinkLostError, FissileError, TimeoutError) as error:
                detail = str(error) or "timed out"
            except Exception as error:
                logger.exception("worker %s: the link failed", self.address)
                detail = f"{type(error).__name__}: {error}"
            backoff = self._settings.reconnect_backoff if self._connected else min(MAX_BACKOFF_SECONDS, backoff * 2)
            self._lose(detail, worker_died=worker_died, is_refused=is_refused)
            # Many routers that lost the same worker do not come back in step.
            pause = backoff * random.uniform(0.5, 1.0)
            await (self._preparation.pause(pause) if has_answered else asyncio.sleep(pause))

    def _lose(self, detail: str, *, worker_died: bool, is_refused: bool) -> None:
        if self._connected:
            self._groups.lost(self.session.lockstep_group)
            logger.warning("worker %s lost with %d open sequences: %s", self.address, len(self._sequences), detail)
        elif detail != self.detail:
            # A worker that was never there may be starting.
            is_expected = self.session.number == 0 and not is_of_tls(detail) and not is_refused
            logger.log(
                logging.INFO if is_expected else logging.WARNING, "waiting for worker %s: %s", self.address, detail
            )
        self._connected = self._serving = self.is_new = False
        self.stub = None
        self.detail = detail
        sinks = self._sequences.clear()
        self._outbox.clear()
        self.load.reset()
        for sink in sinks:
            sink.on_lost(f"worker {self.address} lost: {detail}", worker_died=worker_died)
        self._on_change()

    async def _session(self, channel: grpc.aio.Channel) -> None:
        """One connection, from its stream to its end. Always raises.

        The stream comes first: it breaks with the worker's process, so while it lives, all that is asked later is
        answered by the same process.
        """
        stub = self._preparation.stub(channel)
        timeout = self._settings.connect_timeout
        call = stub.Execute()
        async with asyncio.timeout(timeout):
            await call.initial_metadata()
        info = await stub.GetWorker(GetWorkerRequest(), timeout=timeout)
        tokenizer = await self._preparation.tokenizer(stub, info.tokenizer_fingerprint)
        if call.done():
            await self._read(call)  # raises: the stream was refused, by a worker that has loaded since then
        if self.info is None or info.epoch != self.info.epoch:
            self.breaker.reset()
        self.info, self.tokenizer, self.version, self.stub = info, tokenizer, Version.of(info), stub
        self.load.block_size, self.load.max_num_seqs = info.block_size, info.max_num_seqs
        self._connected, self.is_new = True, False
        self.session = Session(self.address, self.session.number + 1, info.lockstep_group)
        self._liveness = Liveness(self._settings)
        self._on_change()
        await until_first_ends(
            self._read(call),
            self._write(call),
            self._watch_health(channel),
            self._liveness.watch(stub, self._on_load),
            self._watch_stalls(),
        )

    async def _read(self, call: Any) -> None:
        while True:
            response: ExecuteResponse = await call.read()
            if response is grpc.aio.EOF:
                raise LinkLostError("the worker ended the stream")
            await self._deliver(response)

    async def _deliver(self, response: ExecuteResponse) -> None:
        """A large step in parts: others come in between. First tokens are in the first one."""
        now, num_endings = time.monotonic(), 0
        self._sequences.on_step(response.step, response.load, response.last_sequence_id)
        awaits_answers = self.load.awaits_answers
        for number, output in enumerate(self.load.newcomers_first(response.outputs), 1):
            if awaits_answers:
                self.load.answered(output.sequence_id)
            sink = self._sequences.take(output, now)
            if output.finish_reason:
                num_endings += 1
                if output.worker_failed:
                    self._groups.lost(self.session.lockstep_group)
                if sink is not None:
                    self.load.closed(output.sequence_id)
            if sink is not None:
                sink.on_output(output, now)
            if number % OUTPUTS_PER_TURN == 0:
                await asyncio.sleep(0)
        self._liveness.heard(response.step, num_endings, now)
        if response.HasField("load"):
            self.load.reported(response.load)

    async def _write(self, call: Any) -> None:
        while True:
            for commands in await self._outbox.take(gathers=self.load.has_enough):
                await call.write(ExecuteRequest(commands=commands))

    async def _watch_health(self, channel: grpc.aio.Channel) -> None:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        with closing(StateLog(self._tell_health)) as log:
            async for response in call:
                serving = response.status == health_pb2.HealthCheckResponse.SERVING
                if serving != self._serving:
                    log.changed(serving)
                self._serving = serving
                self.detail = "" if serving else "it takes no new requests"
                self._on_change()
        raise LinkLostError("the worker ended the health watch")

    def _tell_health(self, serving: bool, note: str) -> None:
        logger.info("worker %s %s%s", self.address, "is ready" if serving else "takes no new requests", note)

    def _on_load(self, response: GetLoadResponse) -> None:
        """A quiet worker's answer."""
        self.load.reported(response.load)
        self._sequences.on_step(response.step, response.load)

    async def _watch_stalls(self) -> None:
        while True:
            await asyncio.sleep(self._settings.load_interval)
            for sink, detail in self._sequences.stalled(time.monotonic()):
                sink.on_stalled(f"worker {self.address}: {detail}")
