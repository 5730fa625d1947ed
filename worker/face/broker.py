"""Between the streams of routers and the engine: takes commands to the one, and what it reports to the others.

Used on the event loop only.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fissile import v1
from fissile.errors import CancelledError, FissileError, InvalidArgumentError, UnavailableError
from worker.engine.engine import Engine, StepReport
from worker.engine.reports import joined_outputs
from worker.face.convert_group import ModelLimits
from worker.face.convert_outputs import EngineLostError, add_output, error_to_pb, load_to_pb, refusal_to_error
from worker.face.door import Door
from worker.face.endings import Endings
from worker.face.groups import SequenceGroups
from worker.face.kv_watch import Progress
from worker.face.open_sequences import OpenSequences
from worker.face.requirements import require_at_most
from worker.face.streams import MAX_JOINED_OUTPUTS, ExecuteStream, Messages
from worker.grammars.in_use import GrammarsInUse
from worker.metrics import WorkerMetrics
from worker.traces import SequenceTraces

logger = logging.getLogger(__name__)


ABORT_SECONDS = 5.0
"""How long the engine may take to end aborted sequences: a step, usually."""


@dataclass(frozen=True, slots=True)
class DrainResult:
    num_finished: int
    num_aborted: int
    is_undone: bool


class Broker:
    """One per worker. Whatever happens to the engine, what is open ends, and each sequence once."""

    def __init__(
        self,
        engine: Engine,
        grammars: GrammarsInUse,
        limits: ModelLimits,
        metrics: WorkerMetrics,
        traces: SequenceTraces,
        max_queued: int,
    ) -> None:
        self._metrics = metrics
        self._traces = traces
        self._max_queued = max_queued
        self._streams: set[ExecuteStream] = set()
        self._door = Door()
        self._open = OpenSequences(grammars)
        self._endings = Endings(self._open, engine, metrics, traces)
        self._groups = SequenceGroups(engine, grammars, limits, self._door, self._open, self._endings)
        self.progress = Progress()
        """Of the engine: signalled at each report."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open_stream(self) -> ExecuteStream:
        """Raises UnavailableError once nothing is accepted any more."""
        self._door.check()
        stream = ExecuteStream(self._max_queued)
        self._streams.add(stream)
        return stream

    def close_stream(self, stream: ExecuteStream) -> None:
        """The stream is over: what it still has open is aborted, and nobody hears of it. Idempotent."""
        self._streams.discard(stream)
        engine_ids, detail = list(stream.engine_ids.values()), "the router's stream ended"
        self._endings.drop(engine_ids, CancelledError(detail))
        self._groups.stop(engine_ids, detail)

    def handle(self, stream: ExecuteStream, command: v1.ExecuteCommand) -> None:
        """Carry out a command. Raises InvalidArgumentError if it is neither a group nor an abort, or a group without
        sequences, or with more than one message has endings: there is none, or there are too many, to say so."""
        kind = command.WhichOneof("command")
        if kind == "abort":
            self._abort(stream, command.abort.sequence_id)
        elif kind == "group" and (num_sequences := len(command.group.sequences)) > 0:
            require_at_most(MAX_JOINED_OUTPUTS, "commands", num_sequences, "sequences in a group")
            self._groups.start(stream, command.group)
        else:
            raise InvalidArgumentError.of("commands", "neither a group of sequences nor an abort is set")

    def _abort(self, stream: ExecuteStream, sequence_id: int) -> None:
        engine_id = stream.engine_ids.get(sequence_id)
        if engine_id is not None:
            self._groups.stop([engine_id], "aborted by the router")

    def on_reports(self, reports: Items[StepReport]) -> None:
        """Distribute what steps brought: one message to each stream, or several where one would be too large."""
        messages = Messages(reports[-1].step, load_to_pb(reports[-1].load))
        for report in reports:
            if report.finished is not None:
                self._metrics.observe_step(report.finished)
                self._traces.step(report.step, report.finished)
        for output in joined_outputs(reports):
            is_last = output.finish_reason is not None
            entry = self._endings.reported(output) if is_last else self._open.get(output.sequence_id)
            if entry is not None:
                add_output(messages.to(entry.stream), output, entry.sequence_id)
        for engine_id, refusal in chain.from_iterable(report.refused for report in reports):
            error = refusal_to_error(refusal)
            entry = self._endings.refused(engine_id, error)
            if entry is not None:
                messages.to(entry.stream).outputs.append(error_to_pb(error, entry.sequence_id, entry.index))
        self.progress.signal()
        messages.push()

    def fail(self, detail: str) -> None:
        """The engine is lost: every open sequence ends with ERROR, then every stream."""
        error = UnavailableError(f"the worker failed: {detail}")
        self._door.fail(error)
        self._groups.end_all(EngineLostError(error.message))
        self.end_streams(error)

    def end_streams(self, error: FissileError) -> None:
        """End all streams with `error` once what is queued was sent."""
        for stream in self._streams:
            stream.end_with(error)

    def close(self) -> None:
        """Accept nothing any more, for good."""
        self._door.close(UnavailableError("the worker is shutting down"))

    async def drain(self, timeout: float, take_health_down: Callable[[], Awaitable[None]]) -> DrainResult:
        """Accept nothing any more, say so, give what is open `timeout` seconds, then abort it. May be called again.
        Ends early and aborts nothing if it is taken back."""
        undrained = self._door.drain()
        open_before = self._open.ids()
        await take_health_down()
        await _first_of(self._open.wait_until_empty(timeout), undrained.wait())
        num_left = sum(self._open.get(engine_id) is not None for engine_id in open_before)
        if num_left and not undrained.is_set():
            logger.warning("aborting %d sequences that did not finish in %.1f s", num_left, timeout)
            await self._abort_all("the worker is shutting down")
            return DrainResult(len(open_before) - num_left, num_left, is_undone=False)
        return DrainResult(len(open_before) - num_left, 0, is_undone=undrained.is_set())

    def undrain(self) -> None:
        """Accept again. Idempotent. Raises UnavailableError for a worker that has failed or shuts down."""
        self._door.undrain()

    async def _abort_all(self, detail: str) -> None:
        """Through the engine; if that does not answer (a step hangs), without it."""
        self._groups.stop(self._open.ids(), detail)
        if not await self._open.wait_until_empty(ABORT_SECONDS):
            self._groups.end_all(UnavailableError(detail))


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until one of them is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
