"""What happened to published blocks, for observers: numbered, in order, in a bounded buffer."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from common.block_hash import decode_salt, unpack_tokens


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """A published block as an index knows it; `content` is its packed tokens, on a first block with the salt."""

    block_id: int
    hash: int
    parent_hash: int
    content: bytes


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be hit from now on."""

    hash: int
    parent_hash: int
    """`common.block_hash.ROOT_HASH` for the first block of a chain."""
    token_ids: tuple[int, ...]
    salt: bytes
    """On the first block of a chain; the hashes carry it on."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The block with this hash cannot be hit any more."""

    hash: int


@dataclass(frozen=True, slots=True)
class AllCleared:
    """No block can be hit any more."""


KvEvent = BlockStored | BlockRemoved | AllCleared


class KvEvents:
    """Exists only while somebody listens; without it, publishing and evicting cost nothing for observers.

    Events are numbered from 1. An observer takes a `snapshot`, then asks for what came `since`; if it has fallen behind
    the buffer it starts again from a snapshot.
    """

    def __init__(self, published: Callable[[], Iterable[PublishedBlock]], block_size: int, capacity: int) -> None:
        """`published` lists what is published now, parents first."""
        self._list_published = published
        self._block_size = block_size
        self._events: deque[KvEvent] = deque(maxlen=capacity)
        self.last_number = 0

    def snapshot(self) -> tuple[int, list[BlockStored]]:
        """Everything that can be hit now, parents before children, and the number of the last event it includes."""
        return self.last_number, [self._describe(block) for block in self._list_published()]

    def since(self, number: int) -> list[tuple[int, KvEvent]] | None:
        """Events after `number` with their numbers; None if some of them are gone, or `number` was never given."""
        num_missing = self.last_number - number
        if num_missing < 0 or num_missing > len(self._events):
            return None
        events = islice(self._events, len(self._events) - num_missing, None)
        return list(enumerate(events, start=number + 1))

    # Called by the prefix index.

    def stored(self, block: PublishedBlock) -> None:
        self._append(self._describe(block))

    def removed(self, hash: int) -> None:
        self._append(BlockRemoved(hash))

    def cleared(self) -> None:
        self._append(AllCleared())

    def _append(self, event: KvEvent) -> None:
        self.last_number += 1
        self._events.append(event)

    def _describe(self, block: PublishedBlock) -> BlockStored:
        tokens = unpack_tokens(block.content, self._block_size)
        return BlockStored(block.hash, block.parent_hash, tokens, decode_salt(block.content, self._block_size))
