"""Prompts that are being computed, and who waits for their blocks: of equal beginnings one is computed, once."""

from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from worker.core.sequence import Sequence


class _Leader(NamedTuple):
    seq: Sequence
    first: int
    """Index of the first block that it computes itself."""
    hashes: list[int]
    """Of the blocks that it will publish, from that one on."""


class Leaders:
    """A sequence leads from its admission until all its full blocks are published, or it runs no more.

    Who would compute one of these blocks follows it: out of the queue, until the last block that they share is there.
    Hashes only say who waits for whom; what is found in the cache then is compared as ever. All operations cost as much
    as the blocks concerned, whatever waits.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_hash: dict[int, int] = {}
        """Chain hash of a block that is being computed → leader's id."""
        self._leaders: dict[int, _Leader] = {}
        self._followers: dict[int, dict[int, tuple[int, Sequence]]] = {}
        """Leader's id → its followers, if it ever had any: id → blocks that must be published first, and it."""
        self._leader_of: dict[int, int] = {}
        """Follower's id → leader's id."""

    def __bool__(self) -> bool:
        """Whether anybody leads."""
        return bool(self._leaders)

    @property
    def num_followers(self) -> int:
        return len(self._leader_of)

    def followers(self) -> Iterable[Sequence]:
        for followers in self._followers.values():
            for _, seq in followers.values():
                yield seq

    def lead(self, seq: Sequence, first: int, hashes: list[int]) -> None:
        """`seq` computes the full blocks from index `first` on, which have these `hashes`; there may be none."""
        if hashes:
            self._leaders[seq.id] = _Leader(seq, first, hashes)
            # Where two lead with one block, the later one has it: either would do.
            self._by_hash.update(dict.fromkeys(hashes, seq.id))

    def follow(self, seq: Sequence, first: int, hashes: list[int]) -> bool:
        """Has `seq` follow who computes its first block that is not cached; that one has index `first`.

        `hashes` are those of the blocks from there on that it could take over. False if nobody computes that block.
        """
        leader_id = self._by_hash.get(hashes[0]) if hashes else None
        if leader_id is None:
            return False
        num_shared = sum(1 for _ in takewhile(lambda hash: self._by_hash.get(hash) == leader_id, hashes))
        self._followers.setdefault(leader_id, {})[seq.id] = (first + num_shared, seq)
        self._leader_of[seq.id] = leader_id
        return True

    def awaited(self, seq: Sequence) -> tuple[Sequence, int]:
        """Of a follower: its leader, and how many blocks must be published first."""
        leader_id = self._leader_of[seq.id]
        return self._leaders[leader_id].seq, self._followers[leader_id][seq.id][0]

    def discard(self, seq: Sequence) -> None:
        """`seq` follows nobody any more."""
        leader_id = self._leader_of.pop(seq.id, None)
        if leader_id is not None:
            del self._followers[leader_id][seq.id]

    def advance(self, rows: Iterable[Sequence]) -> list[Sequence]:
        """Looks at what `rows` have published; returns the followers that got what they waited for."""
        released: list[Sequence] = []
        for seq in rows:
            leader = self._leaders.get(seq.id)
            if leader is None:
                continue
            num_published = seq.publish_at // self._block_size - 1
            if num_published >= leader.first + len(leader.hashes):
                released += self.dismiss(seq)
                continue
            followers = self._followers.get(seq.id, {})
            ready = [follower for needed, follower in followers.values() if needed <= num_published]
            for follower in ready:
                self.discard(follower)
            released += ready
        return released

    def dismiss(self, seq: Sequence) -> list[Sequence]:
        """`seq` leads nobody any more; returns those that followed it."""
        leader = self._leaders.pop(seq.id, None)
        if leader is None:
            return []
        for hash in leader.hashes:
            if self._by_hash.get(hash) == seq.id:
                del self._by_hash[hash]
        followers = self._followers.pop(seq.id, {})
        for follower_id in followers:
            del self._leader_of[follower_id]
        return [follower for _, follower in followers.values()]
