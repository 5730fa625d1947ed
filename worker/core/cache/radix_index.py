"""Prefix index as a radix tree over blocks: runs of blocks without a branch are one node."""

from collections.abc import Iterator

from common.block_hash import ROOT_HASH
from worker.core.block_chain import Anchor, BlockChain
from worker.core.cache.kv_events import PublishedBlock
from worker.core.cache.prefix_index import PrefixIndex
from worker.core.slices import in_slices


class _Node(Anchor):
    """A run of blocks. Children are keyed by the content of their first block."""

    __slots__ = ("blocks", "children", "contents", "hashes", "parent", "start")

    def __init__(self, parent: "_Node | None", start: int) -> None:
        self.parent = parent
        self.start = start
        """Blocks on the way to its first one."""
        self.contents: list[bytes] = []
        self.hashes: list[int] = []
        self.blocks: list[int] = []
        self.children: dict[bytes, _Node] = {}


class RadixPrefixIndex(PrefixIndex):
    """Content is compared directly, run by run; hashes only name blocks to observers. Evicts leaves first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._root = _Node(None, 0)
        self._node_of: list[_Node | None] = [None] * num_blocks
        self._depth_of = [0] * num_blocks
        """Of a published block: how many blocks lead to it."""

    def match(self, chain: BlockChain, max_blocks: int) -> tuple[list[int], Anchor | None]:
        blocks, node, _ = self._walk(chain.contents, max_blocks)
        return blocks, node

    def publish(
        self, chain: BlockChain, block_table: list[int], start: int, end: int, anchor: Anchor | None
    ) -> Anchor | None:
        blocks, node, depth = self._walk(chain.contents, end)
        at = len(blocks)
        if at == end:
            return node
        if depth < len(node.blocks):
            self._split(node, depth)
        if node.children or node is self._root:
            node = self._add_child(node, chain.contents[at], at)
        hashes = chain.hash_up_to(end)
        for index in range(at, end):
            node.contents.append(chain.contents[index])
            node.hashes.append(hashes[index])
            node.blocks.append(block_table[index])
            self._node_of[block_table[index]] = node
            self._depth_of[block_table[index]] = index
            if self.events is not None:
                content, parent = chain.contents[index], chain.parent_hash(index)
                self.events.stored(PublishedBlock(block_table[index], hashes[index], parent, content))
        return node

    def holds(self, block_id: int) -> bool:
        return self._node_of[block_id] is not None

    def withdraw(self, block_id: int) -> list[int]:
        node = self._node_of[block_id]
        assert node is not None
        at = self._depth_of[block_id] - node.start
        below = [lower for child in node.children.values() for lower in self._collect(child)]
        if at == 0:
            assert node.parent is not None
            del node.parent.children[node.contents[0]]
        vacant = []
        for lower in reversed(below):
            vacant += self._forget(lower.blocks, lower.hashes)
        vacant += self._forget(node.blocks[at:], node.hashes[at:])
        del node.blocks[at:], node.hashes[at:], node.contents[at:]
        node.children = {}
        return vacant

    def clear(self) -> list[int]:
        vacant = list(self._evictable)
        self._evictable.clear()
        self._root = _Node(None, 0)
        self._node_of = [None] * self._num_blocks
        if self.events is not None:
            self.events.cleared()
        return vacant

    def published(self) -> Iterator[PublishedBlock]:
        pending = [self._root]
        while pending:
            node = pending.pop()
            parent_hash = node.parent.hashes[-1] if node.parent is not None and node.parent.hashes else ROOT_HASH
            for block_id, hash, content in zip(node.blocks, node.hashes, node.contents, strict=True):
                yield PublishedBlock(block_id, hash, parent_hash, content)
                parent_hash = hash
            pending.extend(reversed(node.children.values()))

    def _walk(self, contents: list[bytes], max_blocks: int) -> tuple[list[int], _Node, int]:
        """Longest match: its blocks, the node where it ends, and how many blocks of that node belong to it."""
        node, depth = self._root, 0
        blocks: list[int] = []
        at = 0
        while at < max_blocks:
            child = node.children.get(contents[at])
            if child is None:
                break
            node = child
            depth = min(len(node.blocks), max_blocks - at)
            if node.contents[:depth] != contents[at : at + depth]:
                depth = _common_length(node.contents, contents, at, depth)
                blocks += node.blocks[:depth]
                break
            blocks += node.blocks[:depth]
            at += depth
            if depth < len(node.blocks):
                break
        return blocks, node, depth

    def _split(self, node: _Node, depth: int) -> _Node:
        """Makes a node end after `depth` of its blocks; the rest becomes its only child, which is returned."""
        rest = _Node(node, node.start + depth)
        rest.contents, node.contents = node.contents[depth:], node.contents[:depth]
        rest.hashes, node.hashes = node.hashes[depth:], node.hashes[:depth]
        rest.blocks, node.blocks = node.blocks[depth:], node.blocks[:depth]
        rest.children, node.children = node.children, {rest.contents[0]: rest}
        for child in rest.children.values():
            child.parent = rest
        for block_id in rest.blocks:
            self._node_of[block_id] = rest
        return rest

    def _add_child(self, node: _Node, content: bytes, start: int) -> _Node:
        child = _Node(node, start)
        node.children[content] = child
        return child

    def _due(self, num_wanted: int) -> int:
        """Least recently released first, but a leaf before what leads to it.

        A block with others below it is due only when all of those are referenced: its content lives twice, and they
        hold a duplicate. As many as wanted are due at once where they would be so one after another: what lies in a
        leaf below the one released first, or was released up the leaf, as a table is.
        """
        by_release = iter(self._evictable)
        block_id = next(by_release)
        node = self._node_of[block_id]
        assert node is not None
        first = at = self._depth_of[block_id] - node.start
        while True:
            while at + 1 < len(node.blocks) and node.blocks[at + 1] in self._evictable:
                at += 1
            if at + 1 < len(node.blocks):
                return node.blocks[at]
            if not node.children:
                if node.blocks[at] == block_id:
                    while (
                        first > 0 and at + 1 - first < num_wanted and next(by_release, None) == node.blocks[first - 1]
                    ):
                        first -= 1
                return node.blocks[max(first, at + 1 - num_wanted)]
            child = next((child for child in node.children.values() if child.blocks[0] in self._evictable), None)
            if child is None:
                return node.blocks[at]
            node, first, at = child, 0, 0

    def _collect(self, top: _Node) -> list[_Node]:
        nodes, pending = [], [top]
        while pending:
            node = pending.pop()
            nodes.append(node)
            pending.extend(node.children.values())
        return nodes

    def _forget(self, blocks: list[int], hashes: list[int]) -> list[int]:
        """Forgets a run of blocks that was cut off, its tail first; returns those that nobody holds."""
        vacant = []
        for block_id, hash in zip(reversed(blocks), reversed(hashes), strict=True):
            self._node_of[block_id] = None
            if self.events is not None:
                self.events.removed(hash)
            if block_id in self._evictable:
                del self._evictable[block_id]
                vacant.append(block_id)
        return vacant

    def integrity_slices(self) -> Iterator[None]:
        is_seen = bytearray(self._num_blocks)
        pending = [self._root]
        while pending:
            node = pending.pop()
            if node is not self._root and not node.blocks:
                raise RuntimeError("radix index: an empty node")
            for children in in_slices(node.children.items()):
                for first, child in children:
                    if child.parent is not node or child.contents[0] != first:
                        raise RuntimeError("radix index: a child does not hang where it should")
                    pending.append(child)
                yield
            for blocks in in_slices(enumerate(node.blocks)):
                for at, block_id in blocks:
                    if self._depth_of[block_id] != node.start + at:
                        raise RuntimeError(f"radix index: block {block_id} is not where it should be")
                    if self._node_of[block_id] is not node or is_seen[block_id]:
                        raise RuntimeError(f"radix index: block {block_id} is in two nodes, or in none")
                    is_seen[block_id] = True
                yield
        for named in in_slices(zip(self._node_of, is_seen, strict=True)):
            if any(holder is not None and not seen for holder, seen in named):
                raise RuntimeError("radix index: a block names a node outside the tree")
            yield
        for evictable in in_slices(self._evictable):
            if not all(is_seen[block_id] for block_id in evictable):
                raise RuntimeError("radix index: an evictable block is not published")
            yield


def _common_length(run: list[bytes], contents: list[bytes], at: int, limit: int) -> int:
    for offset in range(limit):
        if run[offset] != contents[at + offset]:
            return offset
    return limit
