"""The pool of device blocks: who is free, who is shared by how many, whose content is still worth something."""

from collections import deque
from collections.abc import Iterable, Iterator

from worker.core.cache.checkpoints import Checkpoints
from worker.core.cache.prefix_index import PrefixIndex
from worker.core.slices import in_slices


class BlockPool:
    """Reference-counted blocks 0 … num_blocks − 1.

    A free block is either vacant (no content) or evictable (published content, see `PrefixIndex`). Vacant ones are
    taken first, then evictable ones, least recently given first. All operations are O(1) per block.
    """

    def __init__(
        self,
        num_blocks: int,
        index: PrefixIndex | None,
        *,
        secure: bool = False,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._index = index
        self._checkpoints = checkpoints
        self._ref_counts = [0] * num_blocks
        self._vacant: deque[int] = deque(range(num_blocks))
        self._secure = secure
        self._to_zero: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._vacant) + (self._index.num_evictable if self._index is not None else 0)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return self._index.num_evictable if self._index is not None else 0

    def can_take(self, num_blocks: int) -> bool:
        """Whether so many are free."""
        return num_blocks <= len(self._vacant) or num_blocks <= self.num_free

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def take(self, num_blocks: int) -> list[int]:
        """Hands out blocks with one reference each, owned by the caller. Raises `RuntimeError`, changing nothing."""
        if not self.can_take(num_blocks):
            raise RuntimeError(f"{num_blocks} blocks wanted, {self.num_free} free")
        vacant, counts = self._vacant, self._ref_counts
        while len(vacant) < num_blocks:
            assert self._index is not None
            self._add_vacant(self._index.evict(num_blocks - len(vacant)))
        blocks = []
        for _ in range(num_blocks):
            block = vacant.popleft()
            counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, which must be referenced or evictable."""
        counts = self._ref_counts
        for block in blocks:
            if counts[block] == 0:
                assert self._index is not None
                self._index.claim(block)
            counts[block] += 1

    def give(self, blocks: Iterable[int]) -> None:
        """Takes back one reference of each, in the given order (a table's owner passes it reversed: tail first).

        Raises `RuntimeError` if a block has none left: freeing twice is always a bug.
        """
        counts = self._ref_counts
        index = self._index
        for block in blocks:
            if counts[block] <= 0:
                raise RuntimeError(f"block {block} is freed twice")
            counts[block] -= 1
            if counts[block] == 0:
                if index is not None and index.holds(block):
                    index.release(block)
                else:
                    self._add_vacant([block])

    def clear_cached(self) -> int:
        """Forgets the content of all free blocks and returns how many had any. Content of referenced blocks stays."""
        num_cached = self.num_cached
        if self._index is not None:
            is_idle = self.num_free == self.num_blocks
            self._add_vacant(self._index.clear() if is_idle else self._index.clear_evictable())
        return num_cached

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody finds the content of these blocks any more; who holds them keeps them."""
        if self._index is not None:
            for block in blocks:
                if self._index.holds(block):
                    self._add_vacant(self._index.withdraw(block))

    def take_blocks_to_zero(self) -> list[int]:
        """Blocks that lost their content since the last call, for the next step to clear; empty unless secure."""
        blocks, self._to_zero = self._to_zero, []
        return blocks

    def _add_vacant(self, blocks: list[int]) -> None:
        self._vacant.extend(blocks)
        if self._checkpoints is not None:
            self._checkpoints.drop(blocks)
        if self._secure:
            self._to_zero.extend(blocks)

    def integrity_slices(self, held: dict[int, int]) -> Iterator[None]:
        """`held`: block → how many tables and pins hold it. Raises `RuntimeError` on any contradiction."""
        is_vacant = bytearray(self.num_blocks)
        for blocks in in_slices(self._vacant):
            for block in blocks:
                if is_vacant[block]:
                    raise RuntimeError(f"block pool: block {block} is vacant twice")
                is_vacant[block] = True
            yield
        for counted in in_slices(enumerate(self._ref_counts)):
            for block, count in counted:
                if count != held.get(block, 0):
                    raise RuntimeError(f"block {block}: {count} references counted, {held.get(block, 0)} held")
                evictable = self._index is not None and self._index.is_evictable(block)
                roles = (count > 0) + is_vacant[block] + evictable
                if roles != 1:
                    raise RuntimeError(f"block {block} has {roles} roles")
                if is_vacant[block] and self._index is not None and self._index.holds(block):
                    raise RuntimeError(f"block {block} is vacant and published")
            yield
        if self._index is not None:
            yield from self._index.integrity_slices()
