"""Which published block holds which content: the contract, and its implementation by chain hash.

A block is **published** once its KV is computed and full. The index never owns a block: it names it. A published block
that nobody references is **evictable**: it can still be hit, and is given up lazily when the pool needs it.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from common.block_hash import ROOT_HASH
from worker.core.block_chain import BlockChain
from worker.core.kv_events import KvEvents, StoredBlock


class Anchor:
    """Where a sequence's published chain ends; only the index that made it looks inside."""

    __slots__ = ()


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
    def stored(self) -> Iterator[StoredBlock]:
        """All published blocks, parents before children."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises `RuntimeError` if the index contradicts itself."""


class _Entry(Anchor):
    __slots__ = ("block_id", "children", "content", "hash", "parent")

    def __init__(self, block_id: int, hash: int, content: bytes, parent: "_Entry | None") -> None:
        self.block_id = block_id
        """−1 once withdrawn."""
        self.hash = hash
        self.content = content
        self.parent = parent
        self.children: set[_Entry] = set()


class HashPrefixIndex(PrefixIndex):
    """Chain hash → block. A hash names one block; duplicates keep the existing one."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._by_hash: dict[int, _Entry] = {}
        self._by_block: list[_Entry | None] = [None] * num_blocks

    def match(self, chain: BlockChain, max_blocks: int) -> tuple[list[int], Anchor | None]:
        hashes = chain.hash_up_to(max_blocks)
        contents = chain.contents
        get = self._by_hash.get
        blocks: list[int] = []
        parent: _Entry | None = None
        for index in range(max_blocks):
            entry = get(hashes[index])
            if entry is None or entry.parent is not parent or entry.content != contents[index]:
                break
            blocks.append(entry.block_id)
            parent = entry
        return blocks, parent

    def publish(
        self, chain: BlockChain, block_table: list[int], start: int, end: int, anchor: Anchor | None
    ) -> Anchor | None:
        assert anchor is None or isinstance(anchor, _Entry)
        parent = anchor
        if parent is not None and parent.block_id < 0:
            # What we hung on was evicted (a duplicate of ours): name the chain anew from its start.
            start, parent = 0, None
        hashes = chain.hash_up_to(end)
        for index in range(start, end):
            entry = self._by_hash.get(hashes[index])
            if entry is None:
                entry = self._store(block_table[index], hashes[index], chain.contents[index], parent)
            elif entry.parent is not parent or entry.content != chain.contents[index]:
                return None
            parent = entry
        return parent

    def _store(self, block_id: int, hash: int, content: bytes, parent: _Entry | None) -> _Entry:
        entry = _Entry(block_id, hash, content, parent)
        self._by_hash[hash] = entry
        self._by_block[block_id] = entry
        if parent is not None:
            parent.children.add(entry)
        if self.events is not None:
            self.events.stored(StoredBlock(block_id, hash, parent.hash if parent else ROOT_HASH, content))
        return entry

    def holds(self, block_id: int) -> bool:
        return self._by_block[block_id] is not None

    def withdraw(self, block_id: int) -> list[int]:
        entry = self._by_block[block_id]
        assert entry is not None
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        vacant = []
        doomed = [entry]
        while doomed:
            entry = doomed.pop()
            doomed.extend(sorted(entry.children, key=lambda child: child.block_id))
            if entry.block_id in self._evictable:
                del self._evictable[entry.block_id]
                vacant.append(entry.block_id)
            self._forget(entry)
        return vacant

    def _forget(self, entry: _Entry) -> None:
        del self._by_hash[entry.hash]
        self._by_block[entry.block_id] = None
        if self.events is not None:
            self.events.removed(entry.hash)
        entry.block_id = -1
        entry.parent = None
        entry.children.clear()

    def clear(self) -> list[int]:
        vacant = list(self._evictable)
        for entry in self._by_hash.values():
            self._by_block[entry.block_id] = None
            entry.block_id = -1
        self._by_hash.clear()
        self._evictable.clear()
        if self.events is not None:
            self.events.cleared()
        return vacant

    def stored(self) -> Iterator[StoredBlock]:
        pending = [entry for entry in self._by_hash.values() if entry.parent is None]
        while pending:
            entry = pending.pop()
            parent_hash = entry.parent.hash if entry.parent else ROOT_HASH
            yield StoredBlock(entry.block_id, entry.hash, parent_hash, entry.content)
            pending.extend(sorted(entry.children, key=lambda child: child.block_id, reverse=True))

    def check_integrity(self) -> None:
        named = {entry.block_id for entry in self._by_hash.values()}
        by_block = {block for block, entry in enumerate(self._by_block) if entry is not None}
        if named != by_block or len(named) != len(self._by_hash):
            raise RuntimeError("prefix index: a block has two names, or a name no block")
        if not self._evictable.keys() <= named:
            raise RuntimeError("prefix index: an evictable block is not published")
        for hash, entry in self._by_hash.items():
            if entry.hash != hash or (entry.parent is not None and entry.parent.block_id < 0):
                raise RuntimeError(f"prefix index: block {entry.block_id} hangs on a withdrawn parent")
