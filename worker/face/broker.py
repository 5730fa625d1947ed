"""Who waits for what: takes routers' commands to the engine, and the engine's reports to the routers' streams.

Knows every open sequence, so the promise that each ends exactly once is kept here, whatever happens to the engine.
Used on the event loop only.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from fissile import v1
from fissile.errors import (
    AlreadyExistsError,
    CancelledError,
    FissileError,
    InvalidArgumentError,
    UnavailableError,
)
from worker.core.outputs import SequenceOutput, SequenceTimings
from worker.core.sequence import Sequence
from worker.core.stopping import FinishReason
from worker.engine.engine import Engine, StepReport
from worker.engine.reports import joined_outputs
from worker.face.convert_group import ModelLimits, group_from_pb
from worker.face.convert_outputs import (
    EngineLostError,
    add_output,
    error_to_pb,
    load_to_pb,
    refusal_to_error,
)
from worker.face.door import Door
from worker.face.kv_watch import Progress
from worker.face.open_sequences import OpenSequences
from worker.face.requirements import require_at_most
from worker.face.streams import MAX_JOINED_OUTPUTS, ExecuteStream, Messages
from worker.grammars.errors import GrammarError
from worker.grammars.in_use import GrammarsInUse
from worker.grammars.uncompiled import UncompiledRequests
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
    """One per worker, between its streams and its engine."""

    def __init__(
        self,
        engine: Engine,
        grammars: GrammarsInUse,
        limits: ModelLimits,
        metrics: WorkerMetrics,
        traces: SequenceTraces,
        max_queued: int,
    ) -> None:
        self._engine = engine
        self._grammars = grammars
        self._uncompiled = UncompiledRequests(grammars.compiled, self._on_compiled, self._on_deadline)
        self._limits = limits
        self._metrics = metrics
        self._traces = traces
        self._max_queued = max_queued
        self._streams: set[ExecuteStream] = set()
        self._open = OpenSequences(grammars)
        self._next_engine_id = count(1)
        self._door = Door()
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
        engine_ids = list(stream.engine_ids.values())
        gone = CancelledError("the router's stream ended")
        for engine_id in engine_ids:
            entry = self._open.forget(engine_id)
            if entry is not None:
                self._traces.failed(entry.traceparent, entry.index, entry.arrived, gone)
        self._stop(engine_ids, "the router's stream ended")

    def handle(self, stream: ExecuteStream, command: v1.ExecuteCommand) -> None:
        """Carry out a command. Raises InvalidArgumentError if it is neither a group nor an abort, or a group without
        sequences, or with more than one message has endings: there is none, or there are too many, to say so."""
        kind = command.WhichOneof("command")
        if kind == "abort":
            self._abort(stream, command.abort.sequence_id)
        elif kind == "group" and (num_sequences := len(command.group.sequences)) > 0:
            require_at_most(MAX_JOINED_OUTPUTS, "commands", num_sequences, "sequences in a group")
            self._start(stream, command.group)
        else:
            raise InvalidArgumentError.of("commands", "neither a group of sequences nor an abort is set")

    def on_reports(self, reports: Items[StepReport]) -> None:
        """Distribute what steps brought: one message to each stream, or several where one would be too large."""
        messages = Messages(reports[-1].step, load_to_pb(reports[-1].load))
        for report in reports:
            if report.finished is not None:
                self._metrics.observe_step(report.finished)
                self._traces.step(report.step, report.finished)
        for output in joined_outputs(reports):
            entry = self._open.get(output.sequence_id)
            if output.finish_reason is not None:
                self._observe_end(output)
                self._open.forget(output.sequence_id)
            if entry is not None:
                add_output(messages.to(entry.stream), output, entry.sequence_id)
        for engine_id, refusal in chain.from_iterable(report.refused for report in reports):
            entry = self._open.forget(engine_id)
            if entry is not None:
                error = error_to_pb(refusal_to_error(refusal), entry.sequence_id, entry.index)
                messages.to(entry.stream).outputs.append(error)
        self.progress.signal()
        messages.push()

    def _observe_end(self, output: SequenceOutput) -> None:
        """A terminal output, of a sequence that is not forgotten yet."""
        self._metrics.observe_end(output)
        entry = self._open.get(output.sequence_id)
        if entry is not None:
            self._traces.ended(entry.traceparent, output)

    def fail(self, detail: str) -> None:
        """The engine is lost: every open sequence ends with ERROR, then every stream."""
        error = UnavailableError(f"the worker failed: {detail}")
        self._door.fail(error)
        self._end_all(EngineLostError(error.message))
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
        self._stop(self._open.ids(), detail)
        if not await self._open.wait_until_empty(ABORT_SECONDS):
            self._end_all(UnavailableError(detail))

    def _end_all(self, error: FissileError) -> None:
        """Every open sequence ends with ERROR, whatever the engine says later."""
        self._uncompiled.clear()
        self._end_with(self._open.ids(), error)

    def _start(self, stream: ExecuteStream, group: v1.SequenceGroup) -> None:
        """All of a group or none."""
        stream.last_sequence_id = max(stream.last_sequence_id, *(member.id for member in group.sequences))
        if any(member.id in stream.engine_ids for member in group.sequences):
            self._end_repeated(stream, group)
            return
        engine_ids = [next(self._next_engine_id) for _ in group.sequences]
        try:
            self._door.check()
            sequences = group_from_pb(group, engine_ids, self._limits)
            self._grammars.acquire(seq.sampling.grammar for seq in sequences if seq.sampling.grammar is not None)
        except FissileError as error:
            self._refuse(stream, group, error)
            return
        for member, seq in zip(group.sequences, sequences, strict=True):
            self._open.add(stream, member.id, seq, group.traceparent)
        if sequences[0].sampling.grammar is not None:
            self._uncompiled.add(sequences)
        else:
            self._engine.add(sequences)

    def _end_repeated(self, stream: ExecuteStream, group: v1.SequenceGroup) -> None:
        """An id that is in use comes again: outputs could not be told apart, so both uses end, with one output."""
        for member in group.sequences:
            engine_id = stream.engine_ids.get(member.id)
            if engine_id is not None:
                self._open.forget(engine_id)
                self._stop([engine_id], "its id was used again")
        self._refuse(stream, group, AlreadyExistsError("id: one that is in use came again; all uses are ended"))

    def _refuse(self, stream: ExecuteStream, group: v1.SequenceGroup, error: FissileError) -> None:
        self._traces.refused(group.traceparent, error)
        for sequence_id, index in {member.id: member.index for member in group.sequences}.items():
            self._push_error(stream, sequence_id, index, error)

    def _end_with(self, engine_ids: Iterable[int], error: FissileError) -> None:
        """Each of them that is open ends with ERROR, whatever the engine says later."""
        for engine_id in engine_ids:
            entry = self._open.forget(engine_id)
            if entry is not None:
                self._traces.failed(entry.traceparent, entry.index, entry.arrived, error)
                self._push_error(entry.stream, entry.sequence_id, entry.index, error)

    def _push_error(self, stream: ExecuteStream, sequence_id: int, index: int, error: FissileError) -> None:
        self._metrics.observe_refusal(error)
        response = self._without_step(stream)
        response.outputs.append(error_to_pb(error, sequence_id, index))
        stream.push_endings(response)

    def _without_step(self, stream: ExecuteStream) -> v1.ExecuteResponse:
        return stream.response(self._engine.step, load_to_pb(self._engine.load))

    def _abort(self, stream: ExecuteStream, sequence_id: int) -> None:
        engine_id = stream.engine_ids.get(sequence_id)
        if engine_id is not None:
            self._stop([engine_id], "aborted by the router")

    def _stop(self, engine_ids: list[int], detail: str) -> None:
        """Abort sequences wherever they are. Ids that are unknown or have ended are ignored."""
        for engine_id in engine_ids:
            self._end_uncompiled(engine_id, FinishReason.ABORTED, detail)
        if engine_ids:
            self._engine.abort(engine_ids, detail)

    def _on_deadline(self, engine_id: int) -> None:
        self._end_uncompiled(engine_id, FinishReason.DEADLINE, "the deadline passed")

    def _end_uncompiled(self, engine_id: int, reason: FinishReason, detail: str) -> None:
        """As the scheduler would."""
        seq = self._uncompiled.take(engine_id)
        if seq is None:
            return
        timings = SequenceTimings(seq.arrival_time, None, None, 0)
        output = SequenceOutput(seq.id, seq.index, seq.num_generated_tokens, [], reason, detail, timings=timings)
        self._observe_end(output)
        entry = self._open.forget(seq.id)
        if entry is not None:
            response = self._without_step(entry.stream)
            add_output(response, output, entry.sequence_id)
            entry.stream.push_endings(response)

    def _on_compiled(self, sequences: list[Sequence], error: BaseException | None) -> None:
        if error is None:
            self._engine.add(sequences)
            return
        self._end_with([seq.id for seq in sequences], _compile_error(sequences, error))


def _compile_error(sequences: list[Sequence], error: BaseException) -> FissileError:
    if not isinstance(error, GrammarError):
        return EngineLostError("the worker failed while it compiled a grammar")
    kind = next(seq.sampling.grammar.kind for seq in sequences if seq.sampling.grammar is not None)
    return InvalidArgumentError.of(f"sampling.structured_output.{kind.value}", str(error))


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until one of them is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
