"""Which published block holds which content: the contract of both implementations.

A block is **published** once its KV is computed and full. The index never owns a block: it names it. A published block
that nobody references is **evictable**: it can still be hit, and is given up lazily when the pool needs it.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from worker.core.block_chain import Anchor, BlockChain
from worker.core.cache.kv_events import KvEvents, PublishedBlock


class PrefixIndex(ABC):
    """Contract of both implementations. Sequences reach it through their `BlockChain`; block ids are the pool's."""

    def __init__(self, num_blocks: int) -> None:
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Published blocks without references, least recently released first."""
        self._num_blocks = num_blocks
        self.events: KvEvents | None = None
        """Set while somebody listens."""
        self.num_evictions = 0

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._evictable

    def release(self, block_id: int) -> None:
        """A published block lost its last reference."""
        self._evictable[block_id] = None

    def claim(self, block_id: int) -> None:
        """An evictable block is referenced again. O(1)."""
        del self._evictable[block_id]

    @abstractmethod
    def match(self, chain: BlockChain, max_blocks: int) -> tuple[list[int], Anchor | None]:
        """Longest published prefix of `chain`, at most `max_blocks` blocks. Changes nothing, claims nothing.

        A hit has compared the stored tokens and the identity of the parent, so a hash collision cannot hit.
        """

    @abstractmethod
    def publish(
        self, chain: BlockChain, block_table: list[int], start: int, end: int, anchor: Anchor | None
    ) -> Anchor | None:
        """Names blocks `start` to `end` of a sequence whose KV is computed; the blocks before were published earlier.

        `anchor` is what `match` or the last `publish` returned (None at 0). Content that is already named keeps the
        block it has. Returns the new anchor, or None if a hash collision forbids this chain to go on.
        """

    @abstractmethod
    def holds(self, block_id: int) -> bool:
        """Whether the block is published."""

    @abstractmethod
    def withdraw(self, block_id: int) -> list[int]:
        """Takes a published block out of the index; returns the blocks that have no content any more.

        Blocks whose chain led through it are withdrawn with it: nobody could find them. Those that are referenced are
        not returned; they stay with their holders.
        """

    def evict(self, num_wanted: int) -> list[int]:
        """Gives up what is due; returns the blocks that have no content any more, at least one.

        These are more than wanted only where several hang on the one that is due.
        """
        vacant = self.withdraw(self._due(num_wanted))
        self.num_evictions += len(vacant)
        return vacant

    def clear_evictable(self) -> list[int]:
        """Withdraws every block without references; returns them. Not counted as evictions."""
        vacant: list[int] = []
        while self._evictable:
            vacant += self.withdraw(next(iter(self._evictable)))
        return vacant

    def _due(self, num_wanted: int) -> int:
        """The evictable block to give up next, with what hangs on it."""
        return next(iter(self._evictable))

    @abstractmethod
    def clear(self) -> list[int]:
        """Withdraws everything; returns the blocks that were evictable. No published block may be referenced."""

    @abstractmethod
    def published(self) -> Iterator[PublishedBlock]:
        """All published blocks, parents before children."""

    @abstractmethod
    def integrity_slices(self) -> Iterator[None]:
        """Raises `RuntimeError` if the index contradicts itself."""
