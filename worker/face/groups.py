"""SequenceGroups of sequences, from a router's command to the engine. Used on the event loop only."""

from itertools import count

from fissile import v1
from fissile.errors import AlreadyExistsError, FissileError, InvalidArgumentError
from worker.core.sequence import Sequence
from worker.core.stopping import FinishReason
from worker.engine.engine import Engine
from worker.face.convert_group import ModelLimits, group_from_pb
from worker.face.convert_outputs import EngineLostError
from worker.face.door import Door
from worker.face.endings import Endings
from worker.face.open_sequences import OpenSequences
from worker.face.streams import ExecuteStream
from worker.grammars.errors import GrammarError
from worker.grammars.in_use import GrammarsInUse
from worker.grammars.uncompiled import UncompiledRequests


class SequenceGroups:
    """Each starts as a whole or not at all, after its grammar has been compiled; its sequences stop one by one."""

    def __init__(
        self,
        engine: Engine,
        grammars: GrammarsInUse,
        limits: ModelLimits,
        door: Door,
        open_sequences: OpenSequences,
        endings: Endings,
    ) -> None:
        self._engine = engine
        self._grammars = grammars
        self._uncompiled = UncompiledRequests(grammars.compiled, self._on_compiled, self._on_deadline)
        self._limits = limits
        self._door = door
        self._open = open_sequences
        self._endings = endings
        self._next_engine_id = count(1)

    def start(self, stream: ExecuteStream, group: v1.SequenceGroup) -> None:
        """It has sequences. What cannot start ends, and its router is told why."""
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
            self._endings.refuse_group(stream, group, error)
            return
        for member, seq in zip(group.sequences, sequences, strict=True):
            self._open.add(stream, member.id, seq, group.traceparent)
        if sequences[0].sampling.grammar is not None:
            self._uncompiled.add(sequences)
        else:
            self._engine.add(sequences)

    def stop(self, engine_ids: list[int], detail: str) -> None:
        """Abort sequences wherever they are. Ids that are unknown or have ended are ignored."""
        for engine_id in engine_ids:
            self._end_uncompiled(engine_id, FinishReason.ABORTED, detail)
        if engine_ids:
            self._engine.abort(engine_ids, detail)

    def end_all(self, error: FissileError) -> None:
        """Every open sequence ends with ERROR, whatever the engine says later."""
        self._uncompiled.clear()
        self._endings.refuse(self._open.ids(), error)

    def _end_repeated(self, stream: ExecuteStream, group: v1.SequenceGroup) -> None:
        """An id that is in use comes again: outputs could not be told apart, so both uses end, with one output."""
        error = AlreadyExistsError("id: one that is in use came again; all uses are ended")
        for member in group.sequences:
            engine_id = stream.engine_ids.get(member.id)
            if engine_id is not None:
                self._endings.drop([engine_id], error)
                self.stop([engine_id], "its id was used again")
        self._endings.refuse_group(stream, group, error)

    def _on_compiled(self, sequences: list[Sequence], error: BaseException | None) -> None:
        if error is None:
            self._engine.add(sequences)
            return
        self._endings.refuse([seq.id for seq in sequences], _compile_error(sequences, error))

    def _on_deadline(self, engine_id: int) -> None:
        self._end_uncompiled(engine_id, FinishReason.DEADLINE, "the deadline passed")

    def _end_uncompiled(self, engine_id: int, reason: FinishReason, detail: str) -> None:
        seq = self._uncompiled.take(engine_id)
        if seq is not None:
            self._endings.end_unscheduled(seq, reason, detail)


def _compile_error(sequences: list[Sequence], error: BaseException) -> FissileError:
    if not isinstance(error, GrammarError):
        return EngineLostError("the worker failed while it compiled a grammar")
    kind = next(seq.sampling.grammar.kind for seq in sequences if seq.sampling.grammar is not None)
    return InvalidArgumentError.of(f"sampling.structured_output.{kind.value}", str(error))
