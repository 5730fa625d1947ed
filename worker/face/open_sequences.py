"""Sequences that routers have open. Used on the event loop only."""

import asyncio
from dataclasses import dataclass

from worker.core.params import Grammar
from worker.core.sequence import Sequence
from worker.face.streams import ExecuteStream
from worker.grammars.in_use import GrammarsInUse


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Where its outputs go, under which id."""

    stream: ExecuteStream
    sequence_id: int
    index: int
    grammar: Grammar | None
    traceparent: str
    arrived: float
    """On the monotonic clock."""


class OpenSequences:
    """By engine id. Whoever is told of an end has forgotten the sequence first, so each ends once."""

    def __init__(self, grammars: GrammarsInUse) -> None:
        self._grammars = grammars
        self._open: dict[int, OpenSequence] = {}
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._open)

    def ids(self) -> list[int]:
        return list(self._open)

    def add(self, stream: ExecuteStream, sequence_id: int, seq: Sequence, traceparent: str) -> None:
        """`sequence_id` and `traceparent` are the router's; `seq` holds its grammar already."""
        self._open[seq.id] = OpenSequence(
            stream, sequence_id, seq.index, seq.sampling.grammar, traceparent, seq.arrival_time
        )
        stream.engine_ids[sequence_id] = seq.id
        self._emptied.clear()

    def get(self, engine_id: int) -> OpenSequence | None:
        return self._open.get(engine_id)

    def forget(self, engine_id: int) -> OpenSequence | None:
        """Lets it go, with its grammar; None if it is not open (any more)."""
        entry = self._open.pop(engine_id, None)
        if entry is not None:
            entry.stream.engine_ids.pop(entry.sequence_id, None)
            if entry.grammar is not None:
                self._grammars.release(entry.grammar)
            if not self._open:
                self._emptied.set()
        return entry

    async def wait_until_empty(self, timeout: float) -> bool:
        """False if some are still open after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True
