"""A priority queue of sequences from which any one can be taken out at once."""

import heapq
from typing import Generic, TypeVar

from worker.core.sequence import Sequence

Key = TypeVar("Key")


class LazyHeap(Generic[Key]):
    """Least key first, ties by sequence id. Discarding is O(1): dead entries are skipped, and swept if they prevail."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int]] = []
        self._live: dict[int, tuple[Key, Sequence]] = {}
        self._num_tokens: dict[int, int] = {}
        self.num_tokens = 0
        """Committed tokens of all inside, as of when they were pushed."""

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._live

    def push(self, key: Key, seq: Sequence) -> None:
        """Adds `seq`, which must not be inside."""
        if seq.id in self._live:
            raise RuntimeError(f"sequence {seq.id} is queued twice")
        self._live[seq.id] = (key, seq)
        self._num_tokens[seq.id] = num_tokens = seq.num_tokens
        self.num_tokens += num_tokens
        heapq.heappush(self._heap, (key, seq.id))

    def peek(self) -> tuple[Key, Sequence] | None:
        """First key and sequence, left inside; None if empty."""
        while self._heap:
            key, sequence_id = self._heap[0]
            entry = self._live.get(sequence_id)
            if entry is not None and entry[0] == key:
                return entry
            heapq.heappop(self._heap)
        return None

    def discard(self, sequence_id: int) -> None:
        """Takes the sequence out if it is inside."""
        if self._live.pop(sequence_id, None) is None:
            return
        self.num_tokens -= self._num_tokens.pop(sequence_id)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [(key, seq.id) for key, seq in self._live.values()]
            heapq.heapify(self._heap)

    def sequences(self) -> list[Sequence]:
        """All inside, in no particular order."""
        return [seq for _, seq in self._live.values()]
