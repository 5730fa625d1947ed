"""The sequences that this router has on one worker, and which of them the worker has forgotten.

A worker that makes steps for others may have lost one: by a fault of its scheduler, or of whatever is between. Time
cannot tell that from a long queue or from a preempted sequence; steps can. While nobody waits and nobody is swapped
out, every sequence of the worker runs, and who runs gets a token every few steps. So steps count against a sequence
only while the worker reports that nobody waits, and only those that it made since it took the sequence: a router that
is late reads of many steps at once from before.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from fissile.v1 import RequestOutput, SequenceGroup, WorkerLoad
from router.answering.hop import Sink

STALL_STEPS = 64
"""Without a token, for one that runs. Prefills of others may come between its tokens, a few at a time."""
MAX_ON_WAY = 1 << 16
STALL_SECONDS = 3.0
"""Steps may be short; what is on its way may be late by some of them."""


@dataclass(slots=True)
class _Open:
    sink: Sink
    patience: float
    """Steps that may pass without news."""
    step: int | None
    """The worker's, at its last news or when it took it; None: it has not, as far as is known."""
    news_at: float


class OpenSequences:
    """By id. Used on the event loop only, but for `sinks`."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._step = 0
        """The worker's last one; 0: it has said nothing yet."""
        self._crowded_step = 0
        """The last one after which somebody waited."""
        self._on_way: deque[int] = deque()
        """Ids that the worker has not said that it took; rising."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def sinks(self) -> set[Sink]:
        """Metrics ask from a thread of their own: the copy is made in one go, whatever comes and goes meanwhile."""
        return {entry.sink for entry in list(self._open.values())}

    def add(self, group: SequenceGroup, sink: Sink, now: float) -> None:
        """All of a group, whose sequences have their ids."""
        patience = _patience(group)
        if len(self._on_way) > MAX_ON_WAY:  # of a worker that does not say what it took
            self._on_way = deque(id for id in self._on_way if id in self._open)
        for sequence in group.sequences:
            self._open[sequence.id] = _Open(sink, patience, None, now)
            self._on_way.append(sequence.id)

    def forget(self, sequence_id: int) -> bool:
        """Whether it was open."""
        return self._open.pop(sequence_id, None) is not None

    def clear(self) -> set[Sink]:
        """Forgets all, and counts the steps of another connection; whose they were."""
        sinks, self._open = self.sinks, {}
        self._step = self._crowded_step = 0
        self._on_way.clear()
        return sinks

    def take(self, output: RequestOutput, now: float) -> Sink | None:
        """Whom it is for; nobody, if its sequence is not open. It closes with its last output."""
        entry = self._open.get(output.sequence_id)
        if entry is None:
            return None
        if output.finish_reason:
            del self._open[output.sequence_id]
        elif output.token_ids:
            entry.patience, entry.step, entry.news_at = STALL_STEPS, self._step, now
        return entry.sink

    def on_step(self, step: int, load: WorkerLoad, last_id: int = 0) -> None:
        """What the worker says of itself, before the outputs of that step; `last_id`: of the sequences it has taken."""
        if load.num_waiting or load.num_swapped or not self._step:
            self._crowded_step = step
        self._step = step
        while self._on_way and self._on_way[0] <= last_id:
            entry = self._open.get(self._on_way.popleft())
            if entry is not None:
                entry.step = step

    def stalled(self, now: float) -> Iterator[tuple[Sink, str]]:
        """Whose sequences the worker has forgotten, and how that is known. A sink with several comes once."""
        found: dict[Sink, str] = {}
        for entry in self._open.values():
            if entry.step is None:
                continue
            num_steps = self._step - max(entry.step, self._crowded_step)
            if num_steps > entry.patience and now - entry.news_at > STALL_SECONDS:
                found[entry.sink] = f"the worker made {num_steps} steps and none for it, while nobody waited"
        yield from found.items()


def _patience(group: SequenceGroup) -> float:
    """Until the first token. The prompt is computed, a token a step at worst; a grammar is compiled before the sequence
    is anywhere in the worker's load; a beam search says nothing until its end."""
    if group.sampling.HasField("structured_output") or group.sampling.HasField("beam_search"):
        return math.inf
    return STALL_STEPS + len(group.prompt_token_ids) + max(len(sequence.token_ids) for sequence in group.sequences)
