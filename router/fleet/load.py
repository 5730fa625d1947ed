"""How busy one worker is, as far as this router can know."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fissile.v1 import WorkerLoad


@dataclass(slots=True)
class LoadTracker:
    """Own open sequences, counted before they are sent, plus what the worker's last report says others put on it.

    A report counts everyone's sequences; what was ours at that moment is taken off, so that each router of several sees
    the others' work once and its own exactly.
    """

    num_open: int = 0
    """Sequences of this router that are on the worker or on their way to it."""
    last_report: WorkerLoad | None = None
    block_size: int = 0
    """Tokens per KV block; 0: not known."""
    _prefills: dict[int, int] = field(default_factory=dict)
    """Of groups that have not been answered yet, by their first sequence: tokens to compute."""
    _num_own_prefill_tokens: int = 0
    """The sum."""
    _num_others: int = 0
    _num_others_prefill_tokens: int = 0
    _num_kv_tokens: int = 0
    _num_room_tokens: int | None = None

    def opened(self, sequence_ids: Sequence[int], num_prefill_tokens: int) -> None:
        """A group is sent. `num_prefill_tokens`: to be computed for it, as far as they are not cached."""
        self.num_open += len(sequence_ids)
        self._prefills[sequence_ids[0]] = num_prefill_tokens
        self._num_own_prefill_tokens += num_prefill_tokens

    @property
    def awaits_answers(self) -> bool:
        """There are groups of which nothing has come."""
        return bool(self._prefills)

    def answered(self, sequence_id: int) -> None:
        """Something came of it: its prompt is computed."""
        self._num_own_prefill_tokens -= self._prefills.pop(sequence_id, 0)

    def closed(self, sequence_id: int) -> None:
        self.num_open -= 1
        self.answered(sequence_id)

    def reported(self, load: WorkerLoad) -> None:
        self.last_report = load
        self._num_others = max(0, load.num_running + load.num_waiting + load.num_swapped - self.num_open)
        self._num_others_prefill_tokens = max(0, load.num_waiting_tokens - self._num_own_prefill_tokens)
        self._num_kv_tokens = load.num_used_blocks * self.block_size
        num_free = (load.num_blocks - load.num_used_blocks) * self.block_size
        self._num_room_tokens = num_free if load.num_blocks and self.block_size else None

    def reset(self) -> None:
        """The worker is gone, and everything on it."""
        self.num_open = self._num_own_prefill_tokens = 0
        self.last_report = None
        self._prefills.clear()
        self._num_others = self._num_others_prefill_tokens = self._num_kv_tokens = 0
        self._num_room_tokens = None

    @property
    def num_sequences(self) -> int:
        """Estimate of all sequences on the worker."""
        return self.num_open + self._num_others

    @property
    def num_prefill_tokens(self) -> int:
        """Estimate of what is to be computed before a newcomer's prompt."""
        return self._num_own_prefill_tokens + self._num_others_prefill_tokens

    @property
    def num_kv_tokens(self) -> int:
        """In the cache for sequences, as last reported; what waits for its prefill is not in there yet."""
        return self._num_kv_tokens

    def has_room(self, num_tokens: int) -> bool:
        """Whether the cache takes so many, after those that wait. True where the worker has not said."""
        return self._num_room_tokens is None or self.num_prefill_tokens + num_tokens <= self._num_room_tokens
