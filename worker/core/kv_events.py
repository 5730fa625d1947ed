"""What happened to published blocks, for observers: numbered, in order, in a bounded buffer."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.core.prefix_index import StoredBlock


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be hit from now on."""

    block: "StoredBlock"


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The block with this hash cannot be hit any more."""

    hash: int


@dataclass(frozen=True, slots=True)
class AllCleared:
    """No block can be hit any more."""


KvEvent = BlockStored | BlockRemoved | AllCleared


class KvEvents:
    """Exists only while somebody listens; before, publishing and evicting cost nothing for it.

    Events are numbered from 1. `since` answers a reader who has fallen behind the buffer with None: it must start again
    from a snapshot.
    """

    def __init__(self, snapshot: "Iterable[StoredBlock]", capacity: int) -> None:
        """`snapshot`: what is published now; it becomes the first events."""
        self._events: deque[KvEvent] = deque(maxlen=capacity)
        self.last_number = 0
        for block in snapshot:
            self.stored(block)

    def stored(self, block: "StoredBlock") -> None:
        self._append(BlockStored(block))

    def removed(self, hash: int) -> None:
        self._append(BlockRemoved(hash))

    def cleared(self) -> None:
        self._append(AllCleared())

    def since(self, number: int) -> list[tuple[int, KvEvent]] | None:
        """Events after `number` with their numbers; None if some of them are gone, or `number` was never given."""
        num_missing = self.last_number - number
        if num_missing < 0 or num_missing > len(self._events):
            return None
        events = list(self._events)[len(self._events) - num_missing :]
        return list(enumerate(events, start=number + 1))

    def _append(self, event: KvEvent) -> None:
        self.last_number += 1
        self._events.append(event)
