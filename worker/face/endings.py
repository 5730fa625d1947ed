"""How sequences end: each once, counted, traced, and told to its router. Used on the event loop only."""

from collections.abc import Iterable

from fissile import v1
from fissile.errors import FissileError
from worker.core.outputs import SequenceOutput, SequenceTimings
from worker.core.sequence import Sequence
from worker.core.stopping import FinishReason
from worker.engine.engine import Engine
from worker.face.convert_outputs import add_output, error_to_pb, load_to_pb
from worker.face.open_sequences import OpenSequence, OpenSequences
from worker.face.streams import ExecuteStream
from worker.metrics import WorkerMetrics
from worker.traces import SequenceTraces


class Endings:
    """Whoever ends a sequence does it here. What comes of it later finds it no more, and is nobody's."""

    def __init__(
        self, open_sequences: OpenSequences, engine: Engine, metrics: WorkerMetrics, traces: SequenceTraces
    ) -> None:
        self._open = open_sequences
        self._engine = engine
        self._metrics = metrics
        self._traces = traces

    def reported(self, output: SequenceOutput) -> OpenSequence | None:
        """With this terminal output, which is still to be sent; None: it is not open, and nobody waits for it."""
        self._metrics.observe_end(output)
        entry = self._open.forget(output.sequence_id)
        if entry is not None:
            self._traces.ended(entry.traceparent, output)
        return entry

    def refused(self, engine_id: int, error: FissileError) -> OpenSequence | None:
        """With ERROR, which is still to be sent; None: it is not open."""
        entry = self._open.forget(engine_id)
        if entry is not None:
            self._traces.failed(entry.traceparent, entry.index, entry.arrived, error)
            self._metrics.observe_refusal(error)
        return entry

    def refuse(self, engine_ids: Iterable[int], error: FissileError) -> None:
        """Each of them that is open ends with ERROR, whatever the engine says later."""
        for engine_id in engine_ids:
            entry = self.refused(engine_id, error)
            if entry is not None:
                self._send_error(entry.stream, entry.sequence_id, entry.index, error)

    def refuse_group(self, stream: ExecuteStream, group: v1.SequenceGroup, error: FissileError) -> None:
        """None of its sequences has been opened."""
        self._traces.refused(group.traceparent, error)
        for sequence_id, index in {member.id: member.index for member in group.sequences}.items():
            self._metrics.observe_refusal(error)
            self._send_error(stream, sequence_id, index, error)

    def end_unscheduled(self, seq: Sequence, reason: FinishReason, detail: str) -> None:
        """Of a sequence that the engine has never heard of, as the scheduler would."""
        timings = SequenceTimings(seq.arrival_time, None, None, 0)
        output = SequenceOutput(seq.id, seq.index, seq.num_generated_tokens, [], reason, detail, timings=timings)
        entry = self.reported(output)
        if entry is not None:
            response = self._without_step(entry.stream)
            add_output(response, output, entry.sequence_id)
            entry.stream.push_endings(response)

    def drop(self, engine_ids: Iterable[int], error: FissileError) -> None:
        """Nobody is left to hear of them."""
        for engine_id in engine_ids:
            entry = self._open.forget(engine_id)
            if entry is not None:
                self._traces.failed(entry.traceparent, entry.index, entry.arrived, error)

    def _send_error(self, stream: ExecuteStream, sequence_id: int, index: int, error: FissileError) -> None:
        response = self._without_step(stream)
        response.outputs.append(error_to_pb(error, sequence_id, index))
        stream.push_endings(response)

    def _without_step(self, stream: ExecuteStream) -> v1.ExecuteResponse:
        return stream.response(self._engine.step, load_to_pb(self._engine.load))
