"""How busy one worker is, as far as this router can know."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fissile.v1 import RequestOutput, WorkerLoad

MAX_UNANSWERED = 64
"""A newcomer joins fewer groups of this router that have got nothing yet, and fewer sequences of anybody that wait on
the worker: enough for a step of most. Of a worker that runs many and has nobody waiting, a quarter of these."""
ENOUGH_UNANSWERED = 4
MAX_UNANSWERED_TOKENS = 65_536
"""Of the prompts of these, where they are enough."""


@dataclass(slots=True)
class LoadTracker:
    """Own work, counted before it is sent, plus what the worker's last report says others put on it.

    A report counts everyone's sequences and tokens; what was ours at that moment is taken off, so that each router of
    several sees the others' work once and its own exactly. Policies read these fields of all workers for each request.
    """

    num_open: int = 0
    """Sequences of this router that are on the worker or on their way to it."""
    num_sequences: int = 0
    """Estimate of all sequences on the worker."""
    num_prefill_tokens: int = 0
    """Estimate of what is to be computed before a newcomer's prompt."""
    num_kv_tokens: int = 0
    """In the cache for sequences, as last reported; what waits for its prefill is not among them yet."""
    num_free_tokens: float = math.inf
    """Left in the cache, as last reported; without end where the worker does not say."""
    num_sent: float = 0
    """Groups sent by this router; policies let those of long ago count less."""
    last_report: WorkerLoad | None = None
    block_size: int = 0
    """Tokens per KV block; 0: not known."""
    max_num_seqs: int = 0
    """Sequences that run on the worker at once, while others wait; 0: not known."""
    _prefills: dict[int, int] = field(default_factory=dict)
    """Of own groups that have not been answered yet, by their first sequence: tokens to compute."""
    _num_own_prefill_tokens: int = 0
    """The sum."""

    def opened(self, sequence_ids: Sequence[int], num_prefill_tokens: int) -> None:
        """A group is sent. `num_prefill_tokens`: to be computed for it, as far as they are not cached."""
        self.num_open += len(sequence_ids)
        self.num_sequences += len(sequence_ids)
        self.num_sent += 1
        self._prefills[sequence_ids[0]] = num_prefill_tokens
        self._num_own_prefill_tokens += num_prefill_tokens
        self.num_prefill_tokens += num_prefill_tokens

    @property
    def has_room(self) -> bool:
        """A newcomer would soon be computed; otherwise it had better wait where clients take turns."""
        num_unanswered, limit = len(self._prefills), MAX_UNANSWERED
        if self.last_report:
            if self.last_report.num_waiting >= MAX_UNANSWERED:
                return False
            limit = max(limit, self.last_report.num_running // 4)
        if num_unanswered >= limit:
            return False
        return num_unanswered < ENOUGH_UNANSWERED or self._num_own_prefill_tokens < MAX_UNANSWERED_TOKENS

    @property
    def has_enough(self) -> bool:
        """To begin with: a newcomer would hardly be computed at once."""
        return len(self._prefills) >= ENOUGH_UNANSWERED

    @property
    def has_place(self) -> bool:
        """A newcomer would not wait until another sequence ends, as far as is known."""
        return self.max_num_seqs == 0 or self.num_sequences < self.max_num_seqs

    @property
    def awaits_answers(self) -> bool:
        """There are groups of which nothing has come."""
        return bool(self._prefills)

    def newcomers_first(self, outputs: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
        """Those that answer a group go before all others, if `answered` is told of each as it comes; those of a
        sequence stay in order."""
        if not self._prefills:
            yield from outputs
            return
        others = []
        for output in outputs:
            if output.sequence_id in self._prefills:
                yield output
            else:
                others.append(output)
        yield from others

    def answered(self, sequence_id: int) -> None:
        """Something came of it: its prompt is computed."""
        num_tokens = self._prefills.pop(sequence_id, 0)
        self._num_own_prefill_tokens -= num_tokens
        self.num_prefill_tokens -= num_tokens

    def closed(self, sequence_id: int) -> None:
        self.num_open -= 1
        self.num_sequences -= 1
        self.answered(sequence_id)

    def reported(self, load: WorkerLoad) -> None:
        self.last_report = load
        self.num_sequences = max(self.num_open, load.num_running + load.num_waiting + load.num_swapped)
        self.num_prefill_tokens = max(self._num_own_prefill_tokens, load.num_waiting_tokens)
        self.num_kv_tokens = load.num_used_blocks * self.block_size
        if load.num_blocks and self.block_size:
            self.num_free_tokens = load.num_blocks * self.block_size - self.num_kv_tokens

    def reset(self) -> None:
        """The worker is gone, and everything on it."""
        self._prefills.clear()
        self.num_open = self.num_sequences = self.num_prefill_tokens = self._num_own_prefill_tokens = 0
        self.num_kv_tokens = 0
        self.num_free_tokens = math.inf
        self.num_sent = 0
        self.last_report = None
