"""Prefix index by chain hash.

There may be a million blocks, and the garbage collector walks through every object that could be part of a cycle: so an
entry is no object, but a place in a few lists of numbers and bytes.
"""

from array import array
from collections.abc import Iterator

from common.block_hash import ROOT_HASH
from worker.core.block_chain import Anchor, BlockChain
from worker.core.cache.kv_events import PublishedBlock
from worker.core.cache.prefix_index import PrefixIndex
from worker.core.slices import in_slices

NONE = -1
"""In place of a block."""


class _HashAnchor(Anchor):
    """A block as it was published then: the same block may have another content now."""

    __slots__ = ("block_id", "serial")

    def __init__(self, block_id: int, serial: int) -> None:
        self.block_id = block_id
        self.serial = serial


class HashPrefixIndex(PrefixIndex):
    """Chain hash → block. A hash names one block; duplicates keep the existing one.

    Published blocks form a forest: children of one parent are a doubly linked list through `_next` and `_previous`.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._by_hash: dict[int, int] = {}
        self._hash_of: list[int | None] = [None] * num_blocks
        """None: not published. Then the other lists say nothing."""
        self._content_of = [b""] * num_blocks
        self._serial_of = [0] * num_blocks
        """Differs whenever a block is published."""
        self._num_stored = 0
        none = [NONE] * num_blocks
        self._parent_of = array("i", none)
        self._first_child_of = array("i", none)
        self._next = array("i", none)
        self._previous = array("i", none)

    def match(self, chain: BlockChain, max_blocks: int) -> tuple[list[int], Anchor | None]:
        hashes = chain.hash_up_to(max_blocks)
        contents = chain.contents
        get, parents, contents_of = self._by_hash.get, self._parent_of, self._content_of
        blocks: list[int] = []
        parent = NONE
        for index in range(max_blocks):
            block = get(hashes[index])
            if block is None or parents[block] != parent or contents_of[block] != contents[index]:
                break
            blocks.append(block)
            parent = block
        return blocks, self._anchor(parent)

    def publish(
        self, chain: BlockChain, block_table: list[int], start: int, end: int, anchor: Anchor | None
    ) -> Anchor | None:
        parent = NONE
        if anchor is not None:
            assert isinstance(anchor, _HashAnchor)
            if self._hash_of[anchor.block_id] is not None and self._serial_of[anchor.block_id] == anchor.serial:
                parent = anchor.block_id
            else:
                # What we hung on was evicted (a duplicate of ours): name the chain anew from its start.
                start = 0
        hashes, contents = chain.hash_up_to(end), chain.contents
        for index in range(start, end):
            hash, content = hashes[index], contents[index]
            block = self._by_hash.get(hash)
            if block is None:
                block = block_table[index]
                self._store(block, hash, content, parent)
            elif self._parent_of[block] != parent or self._content_of[block] != content:
                return None
            parent = block
        return self._anchor(parent)

    def _anchor(self, block_id: int) -> Anchor | None:
        return _HashAnchor(block_id, self._serial_of[block_id]) if block_id != NONE else None

    def _store(self, block_id: int, hash: int, content: bytes, parent: int) -> None:
        self._by_hash[hash] = block_id
        self._hash_of[block_id] = hash
        self._content_of[block_id] = content
        self._num_stored += 1
        self._serial_of[block_id] = self._num_stored
        self._parent_of[block_id] = parent
        self._first_child_of[block_id] = self._previous[block_id] = sibling = NONE
        if parent != NONE:
            sibling = self._first_child_of[parent]
            self._first_child_of[parent] = block_id
            if sibling != NONE:
                self._previous[sibling] = block_id
        self._next[block_id] = sibling
        if self.events is not None:
            self.events.stored(PublishedBlock(block_id, hash, self._parent_hash(block_id), content))

    def _parent_hash(self, block_id: int) -> int:
        parent = self._parent_of[block_id]
        hash = self._hash_of[parent] if parent != NONE else ROOT_HASH
        assert hash is not None
        return hash

    def holds(self, block_id: int) -> bool:
        return self._hash_of[block_id] is not None

    def withdraw(self, block_id: int) -> list[int]:
        self._detach(block_id)
        vacant = []
        doomed = [block_id]
        while doomed:
            block = doomed.pop()
            doomed.extend(self._children(block))
            if block in self._evictable:
                del self._evictable[block]
                vacant.append(block)
            self._forget(block)
        return vacant

    def _children(self, block_id: int) -> Iterator[int]:
        child = self._first_child_of[block_id]
        while child != NONE:
            yield child
            child = self._next[child]

    def _detach(self, block_id: int) -> None:
        parent, previous, following = self._parent_of[block_id], self._previous[block_id], self._next[block_id]
        if previous != NONE:
            self._next[previous] = following
        elif parent != NONE:
            self._first_child_of[parent] = following
        if following != NONE:
            self._previous[following] = previous

    def _forget(self, block_id: int) -> None:
        hash = self._hash_of[block_id]
        assert hash is not None
        del self._by_hash[hash]
        self._hash_of[block_id] = None
        self._content_of[block_id] = b""
        if self.events is not None:
            self.events.removed(hash)

    def clear(self) -> list[int]:
        vacant = list(self._evictable)
        for block in self._by_hash.values():
            self._hash_of[block] = None
            self._content_of[block] = b""
        self._by_hash.clear()
        self._evictable.clear()
        if self.events is not None:
            self.events.cleared()
        return vacant

    def published(self) -> Iterator[PublishedBlock]:
        pending = [block for block in self._by_hash.values() if self._parent_of[block] == NONE]
        while pending:
            block = pending.pop()
            hash = self._hash_of[block]
            assert hash is not None
            yield PublishedBlock(block, hash, self._parent_hash(block), self._content_of[block])
            pending.extend(self._children(block))

    def integrity_slices(self) -> Iterator[None]:
        is_child = bytearray(self._num_blocks)
        for named in in_slices(self._by_hash.items()):
            for hash, block in named:
                if self._hash_of[block] != hash:
                    raise RuntimeError(f"hash index: block {block} goes by another name")
                for child in self._children(block):
                    if is_child[child] or self._hash_of[child] is None or self._parent_of[child] != block:
                        raise RuntimeError(f"hash index: block {child} hangs where it should not")
                    is_child[child] = True
            yield
        for published in in_slices(zip(self._hash_of, self._parent_of, is_child, strict=True)):
            for block_hash, parent, hangs in published:
                if block_hash is not None and block_hash not in self._by_hash:
                    raise RuntimeError("hash index: a published block has no name")
                if block_hash is not None and parent != NONE and not hangs:
                    raise RuntimeError("hash index: a block hangs on a withdrawn parent")
            yield
        for evictable in in_slices(self._evictable):
            if any(self._hash_of[block] is None for block in evictable):
                raise RuntimeError("hash index: an evictable block is not published")
            yield
