"""Blocks and state groups of sequences: a façade over pool, host pool and prefix index."""

from bisect import insort
from collections.abc import Iterator

from common.block_hash import BlockHasher, default_hasher
from worker.core.block_chain import Anchor, BlockChain
from worker.core.cache.block_pool import BlockPool
from worker.core.cache.checkpoints import Checkpoints
from worker.core.cache.hash_index import HashPrefixIndex
from worker.core.cache.kv_events import KvEvents
from worker.core.cache.prefix_index import PrefixIndex
from worker.core.cache.radix_index import RadixPrefixIndex
from worker.core.cache.state_groups import StateGroups
from worker.core.config import CacheConfig
from worker.core.sequence import Sequence

NEVER = 1 << 62
"""A `publish_at` that no sequence reaches."""


def build_index(cache: CacheConfig) -> PrefixIndex | None:
    """The configured prefix index, or None if prefix caching is off."""
    if not cache.enable_prefix_caching:
        return None
    kind = HashPrefixIndex if cache.prefix_index == "hash" else RadixPrefixIndex
    return kind(cache.num_blocks)


class BlockManager:
    """Gives blocks to sequences and takes them back. Knows tokens and blocks, not what is in them."""

    def __init__(self, cache: CacheConfig, hasher: BlockHasher = default_hasher) -> None:
        self.block_size = cache.block_size
        self.index = build_index(cache)
        groups = range(cache.num_groups, cache.num_groups + cache.num_checkpoints)
        self.checkpoints = Checkpoints(groups) if groups else None
        self.pool = BlockPool(cache.num_blocks, self.index, secure=cache.secure, checkpoints=self.checkpoints)
        self.host_pool = BlockPool(cache.num_host_blocks, None)
        self._hasher = hasher
        self.groups = StateGroups(cache.num_groups)
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    def listen(self, capacity: int) -> KvEvents | None:
        """Events of the prefix index from now on, the same object for all observers; None if caching is off."""
        if self.index is None:
            return None
        if self.index.events is None:
            self.index.events = KvEvents(self.index.published, self.block_size, capacity)
        return self.index.events

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def match(self, seq: Sequence) -> tuple[list[int], Anchor | None]:
        """Cached blocks of its prefix, without claiming them; at least one token is left to compute.

        Only what is computed and published can be found; for what is being computed see `Leaders`.
        """
        if self.index is None or seq.needs_whole_prompt:
            return [], None
        return self.index.match(self._chain_of(seq), (seq.num_tokens - 1) // self.block_size)

    def resumable(self, seq: Sequence, hits: list[int], anchor: Anchor | None) -> tuple[list[int], Anchor | None]:
        """Of what `match` found, that after which `seq` can go on: where there is state, up to a checkpoint."""
        num_usable = len(hits) if self.checkpoints is None else self.checkpoints.num_usable(hits)
        if num_usable == len(hits):
            return hits, anchor
        assert self.index is not None
        return self.index.match(self._chain_of(seq), num_usable)

    def plan_checkpoints(self, seq: Sequence, num_found: int) -> None:
        """`seq`, which comes in, will leave its state after what it found cached, and after its last full block that is
        followed by something."""
        if self.checkpoints is not None:
            size = self.block_size
            places = {num_found * size, (seq.num_tokens - 1) // size * size}
            seq.checkpoints_at = sorted(place for place in places if place > seq.num_computed_tokens)

    def ask_checkpoint(self, seq: Sequence, num_blocks: int) -> None:
        """`seq` will leave its state after so many blocks, too, where somebody waits to go on; unless it is beyond."""
        place = num_blocks * self.block_size
        if self.checkpoints is not None and place > seq.num_computed_tokens and place not in seq.checkpoints_at:
            insort(seq.checkpoints_at, place)

    def add_checkpoint(self, seq: Sequence) -> int | None:
        """The group to copy the state of `seq` to, when the step is over that computes its `num_computed_tokens`, the
        last of them of a full block; None where it is known already."""
        assert self.checkpoints is not None and self.index is not None
        num_blocks = seq.num_computed_tokens // self.block_size
        # Where others have published the same, theirs is what is found.
        published, _ = self.index.match(self._chain_of(seq), num_blocks)
        return self.checkpoints.add(published[-1] if len(published) == num_blocks else seq.block_table[num_blocks - 1])

    def hashes(self, seq: Sequence, first: int) -> list[int]:
        """Chain hashes of all full blocks of its committed tokens, from block `first` on; none without a cache."""
        if self.index is None:
            return []
        chain = self._chain_of(seq)
        end = len(chain.contents)
        return chain.hash_up_to(end)[first:] if first < end else []

    def can_allocate(self, hits: list[int], num_blocks: int, num_spare: int) -> bool:
        """Whether a table of `num_blocks`, of which `hits` exist, leaves `num_spare` blocks free. Changes nothing.

        Hits that are free count against the free blocks: claiming takes them.
        """
        num_free_hits = sum(1 for block in hits if self.pool.ref_count(block) == 0) if hits else 0
        num_needed = num_blocks - len(hits) + num_free_hits + num_spare
        return self.pool.can_take(num_needed) and self.groups.can_take

    def allocate(self, seq: Sequence, hits: list[int], anchor: Anchor | None, num_blocks: int) -> None:
        """Claims `hits` and takes the rest of `num_blocks`. The caller has asked `can_allocate`.

        Sets the computed tokens of `seq` to those of the hits.
        """
        self.pool.share(hits)
        self._bind(seq, hits + self.pool.take(num_blocks - len(hits)))
        seq.num_computed_tokens = num_cached = len(hits) * self.block_size
        seq.restored_group = self.checkpoints.use(hits[-1]) if hits and self.checkpoints is not None else -1
        seq.anchor = anchor
        seq.publish_at = num_cached + self.block_size if self.index is not None else NEVER
        # What was computed before a preemption and is found again says nothing about the cache.
        if not seq.num_preemptions:
            self.num_prefix_queries += seq.num_tokens
            self.num_prefix_hits += num_cached

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Gives `child` the parent's blocks of the first `num_tokens` tokens, all shared, and no group yet.

        Before the child writes into one of them, `make_writable` must be called for it.
        """
        table = parent.block_table[: self.num_blocks_for(num_tokens)]
        self.pool.share(table)
        self._bind_table(child, table)
        child.anchor = None
        child.publish_at = self.block_size if self.index is not None else NEVER

    def is_shared(self, seq: Sequence, index: int, pinned_blocks: list[int]) -> bool:
        """Whether others hold block `index` of its table, too, if it has that many: then it must not be written.

        Pins do not count: they hold the source of a copy that is made before anything of the step is written.
        """
        if index >= len(seq.block_table):
            return False
        block = seq.block_table[index]
        return self.pool.ref_count(block) - pinned_blocks.count(block) > 1

    def make_writable(self, seq: Sequence, index: int) -> tuple[int, int]:
        """Replaces the shared block `index` of the table by a fresh one; returns (source, destination) to copy.

        The reference to the source passes to the caller, who gives it back when the step is complete, so that nothing
        overwrites it in the step that copies it. Needs one free block.
        """
        source = seq.block_table[index]
        (destination,) = self.pool.take(1)
        seq.block_table[index] = destination
        return source, destination

    def grow(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Appends fresh blocks to its table; they must be free."""
        blocks = self.pool.take(num_blocks)
        seq.block_table += blocks
        seq.num_block_tokens += num_blocks * self.block_size
        return blocks

    def unbind(self, seq: Sequence) -> tuple[list[int], int]:
        """Publishes what is late and takes table and group away from `seq`. They are the caller's, for `give_back`."""
        size = self.block_size
        # Who may be late has only decoded: a step in flight, whose output may not be finite, has one token of it.
        num_proven_tokens = seq.num_computed_tokens - seq.num_in_flight_tokens
        if seq.publish_at % size and num_proven_tokens // size >= seq.publish_at // size:
            self.publish(seq, num_proven_tokens)
        seq.publish_at = NEVER
        held = seq.block_table, seq.group_id
        seq.block_table = []
        seq.num_block_tokens = 0
        seq.group_id = -1
        seq.anchor = None
        return held

    def give_back(self, block_table: list[int], group_id: int) -> None:
        """Frees what `unbind` returned, tail first, so that a chain loses its tail first."""
        self.pool.give(reversed(block_table))
        self.groups.give(group_id)

    def can_swap_out(self, seq: Sequence) -> bool:
        return self.num_blocks_for(seq.num_computed_tokens) <= self.host_pool.num_free

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]]:
        """Gives `seq` host blocks for its computed tokens; returns (device, host) pairs. The table stays: unbind it."""
        device = seq.block_table[: self.num_blocks_for(seq.num_computed_tokens)]
        seq.host_block_table = self.host_pool.take(len(device))
        return list(zip(device, seq.host_block_table, strict=True))

    def swap_in(self, seq: Sequence, num_blocks: int) -> list[tuple[int, int]]:
        """Gives `seq` fresh device blocks, `num_blocks` in all; returns (host, device) pairs.

        The host blocks are the caller's, to give back once the step is complete: within a step copies out come first.
        """
        host, seq.host_block_table = seq.host_block_table, []
        self._bind(seq, self.pool.take(num_blocks))
        # Its blocks are new: what it had published is published again from the start, duplicates aside.
        seq.publish_at = self.block_size if self.index is not None else NEVER
        return list(zip(host, seq.block_table, strict=False))

    def publish(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Publishes its blocks that are full and computed. Tokens up to `num_computed_tokens` must be committed.

        Who decodes from here on publishes its next block late, by less than a block of steps and each slot by another
        number, so that rows in step do not publish all at once. `unbind` makes up for what is late.
        """
        assert self.index is not None
        size = self.block_size
        start, end = seq.publish_at // size - 1, num_computed_tokens // size
        seq.anchor = anchor = self.index.publish(self._chain_of(seq), seq.block_table, start, end, seq.anchor)
        decodes = num_computed_tokens == seq.num_tokens and seq.beam_group is None
        lateness = seq.slot % size if decodes else 0
        seq.publish_at = (end + 1) * size + lateness if anchor is not None else NEVER

    def withdraw(self, seq: Sequence) -> None:
        """Nobody finds any cached block of its tokens again, nor what hangs on one. Who holds such blocks keeps them.

        Whatever became of `seq` itself: its tokens tell, not its table.
        """
        if self.index is not None:
            found, _ = self.index.match(self._chain_of(seq), seq.num_tokens // self.block_size)
            self.pool.forget(found[:1])
            if self.checkpoints is not None:
                self.checkpoints.drop(found)
            seq.publish_at = NEVER

    def _chain_of(self, seq: Sequence) -> BlockChain:
        """With all full blocks of its committed tokens."""
        chain = seq.chain
        if chain is None:
            chain = seq.chain = BlockChain(self.block_size, seq.cache_salt, self._hasher)
        chain.extend(seq.token_ids)
        return chain

    def _bind(self, seq: Sequence, block_table: list[int]) -> None:
        self._bind_table(seq, block_table)
        self.groups.take(seq)

    def _bind_table(self, seq: Sequence, block_table: list[int]) -> None:
        seq.block_table = block_table
        seq.num_block_tokens = len(block_table) * self.block_size

    def integrity_slices(self, held: dict[int, int], host_held: dict[int, int], num_groups_held: int) -> Iterator[None]:
        """Raises `RuntimeError` unless what the pools count is what the caller says is held."""
        yield from self.pool.integrity_slices(held)
        yield from self.host_pool.integrity_slices(host_held)
        if self.checkpoints is not None:
            self.checkpoints.check()
        self.groups.check(num_groups_held)
