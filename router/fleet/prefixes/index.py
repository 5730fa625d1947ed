"""Which workers have which blocks, in one table for all of them: a block's hash → a bit for each worker that has it.

A lookup walks a prompt's blocks once, whatever the number of workers, and stops where none is left. Beside the table
each worker has a view with its own blocks, the longest unused first, so that what goes with a worker, or must go to
keep to the bound, is found without a search.
"""

from collections.abc import Collection, Iterable, Reversible
from itertools import islice

from router.fleet.session import Session

BYTES_PER_BLOCK = 256
"""Of one block of one worker, in the table and in the view, at the most."""
_SHARE_TO_DROP = 8
"""One of so many goes at once: each time the whole view is walked from its beginning."""


class PrefixIndex:
    """Bounded: when all views together have too many blocks, the largest one drops those unused for longest."""

    def __init__(self, max_bytes: int) -> None:
        self.max_blocks = max(1, max_bytes // BYTES_PER_BLOCK)
        self.num_blocks = 0
        """Of all views."""
        self._holders: dict[int, int] = {}
        """By hash: the bits of the views that have the block; never 0."""
        self._views: dict[int, View] = {}
        """By bit."""
        self._all_bits = 0

    @property
    def num_bytes(self) -> int:
        """An upper estimate."""
        return self.num_blocks * BYTES_PER_BLOCK

    def open(self, session: Session, max_blocks: int | None = None) -> "View":
        """A new, empty view of the worker of this session; close it. `max_blocks`: a bound of its own."""
        bit = ~self._all_bits & (self._all_bits + 1)
        self._all_bits |= bit
        view = self._views[bit] = View(session, self, self._holders, bit, max_blocks)
        return view

    def closed(self, bit: int) -> None:
        """Called by a view."""
        del self._views[bit]
        self._all_bits &= ~bit

    def match(self, hashes: Iterable[int]) -> dict[Session, int]:
        """How many of the first blocks each worker has without a gap; those with none are left out."""
        holders, left = self._holders, self._all_bits
        found: dict[Session, int] = {}
        num_blocks = 0
        for hash in hashes if left else ():
            have = holders.get(hash, 0) & left
            if have != left:
                if num_blocks:
                    self._ended(left ^ have, num_blocks, found)
                left = have
                if not left:
                    break
            num_blocks += 1
        if num_blocks:
            self._ended(left, num_blocks, found)
        return found

    def _ended(self, bits: int, num_blocks: int, found: dict[Session, int]) -> None:
        while bits:
            bit = bits & -bits
            found[self._views[bit].session] = num_blocks
            bits ^= bit

    def shrink(self) -> None:
        """Called by a view that has grown."""
        while self.num_blocks > self.max_blocks:
            max(self._views.values(), key=len).drop_longest_unused()


class View:
    """What one worker has."""

    def __init__(
        self, session: Session, index: PrefixIndex, holders: dict[int, int], bit: int, max_blocks: int | None
    ) -> None:
        self.session = session
        self._index = index
        self._holders = holders
        self._bit = bit
        self._max_blocks = max_blocks
        self._blocks: dict[int, None] = {}
        """Longest unused first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, hash: int) -> bool:
        return hash in self._blocks

    def store(self, hashes: Iterable[int]) -> None:
        """It has these blocks, too."""
        blocks, holders, bit = self._blocks, self._holders, self._bit
        num_before = len(blocks)
        for hash in hashes:
            blocks[hash] = None
            holders[hash] = holders.get(hash, 0) | bit
        self._grown(num_before)

    def use(self, hashes: Reversible[int]) -> None:
        """It has these blocks of a chain, and uses them now. The first is noted last: without it the others are of no
        use."""
        blocks, holders, bit = self._blocks, self._holders, self._bit
        num_before = len(blocks)
        for hash in reversed(hashes):
            if hash in blocks:
                del blocks[hash]
            else:
                holders[hash] = holders.get(hash, 0) | bit
            blocks[hash] = None
        self._grown(num_before)

    def _grown(self, num_before: int) -> None:
        self._index.num_blocks += len(self._blocks) - num_before
        while self._max_blocks is not None and len(self._blocks) > self._max_blocks:
            self.drop_longest_unused()
        self._index.shrink()

    def remove(self, hashes: Iterable[int]) -> None:
        """It has them no more; those that it did not have are no fault."""
        blocks = self._blocks
        gone = {hash for hash in hashes if hash in blocks}
        for hash in gone:
            del blocks[hash]
        self._let_go(gone)

    def clear(self) -> None:
        blocks, self._blocks = self._blocks, {}
        self._let_go(blocks)

    def close(self) -> None:
        """Idempotent. Nothing of it is left in the index."""
        self.clear()
        if self._bit:
            self._index.closed(self._bit)
            self._bit = 0

    def drop_longest_unused(self) -> None:
        """Some of its blocks."""
        self.remove(list(islice(self._blocks, -(-len(self._blocks) // _SHARE_TO_DROP))))

    def _let_go(self, hashes: Collection[int]) -> None:
        """These have left `_blocks`."""
        self._index.num_blocks -= len(hashes)
        holders, others = self._holders, ~self._bit
        for hash in hashes:
            left = holders[hash] & others
            if left:
                holders[hash] = left
            else:
                del holders[hash]
