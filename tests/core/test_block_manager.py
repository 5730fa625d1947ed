"""Blocks of sequences: exact tables, reference counts and free order. Blocks of 16 tokens."""

import pytest

from tests.core.builders import make_sequence
from worker.core.cache.block_manager import NEVER, BlockManager
from worker.core.config import CacheConfig
from worker.core.sequence import Sequence
from worker.core.slices import exhaust

BOTH_INDEXES = pytest.mark.parametrize("kind", ["hash", "radix"])
COMMON = list(range(500, 548))
"""Three full blocks."""


def make_manager(kind: str = "hash", num_blocks: int = 10, **cache: object) -> BlockManager:
    return BlockManager(CacheConfig(num_blocks=num_blocks, prefix_index=kind, **cache))


def admit(manager: BlockManager, seq: Sequence) -> list[int]:
    """Gives `seq` blocks for all its tokens and computes them; returns the hits."""
    hits, anchor = manager.match(seq)
    manager.allocate(seq, hits, anchor, manager.num_blocks_for(seq.num_tokens))
    seq.num_computed_tokens = seq.num_tokens
    if seq.num_computed_tokens >= seq.publish_at:
        manager.publish(seq, seq.num_computed_tokens)
    return hits


def release(manager: BlockManager, seq: Sequence) -> None:
    manager.give_back(*manager.unbind(seq))


def refs(manager: BlockManager) -> list[int]:
    return [manager.pool.ref_count(block) for block in range(manager.pool.num_blocks)]


def take_all(manager: BlockManager) -> list[int]:
    return manager.pool.take(manager.pool.num_free)


@BOTH_INDEXES
def test_miss_takes_vacant_blocks_in_order(kind: str) -> None:
    manager = make_manager(kind)
    seq = make_sequence(1, [*COMMON, *range(7)])
    assert admit(manager, seq) == []
    assert (seq.block_table, seq.num_block_tokens) == ([0, 1, 2, 3], 64)


@BOTH_INDEXES
def test_common_prefix_is_shared(kind: str) -> None:
    manager = make_manager(kind)
    admit(manager, make_sequence(1, [*COMMON, *range(7)]))
    other = make_sequence(2, [*COMMON, *range(50, 55)])
    assert admit(manager, other) == [0, 1, 2]
    assert other.block_table == [0, 1, 2, 4]
    assert refs(manager) == [2, 2, 2, 1, 1, 0, 0, 0, 0, 0]


@BOTH_INDEXES
def test_free_order_is_vacant_first_then_tail_of_the_chain_first(kind: str) -> None:
    manager = make_manager(kind)
    first, second = make_sequence(1, [*COMMON, *range(7)]), make_sequence(2, [*COMMON, *range(50, 55)])
    admit(manager, first)
    admit(manager, second)
    release(manager, first)
    release(manager, second)
    assert (manager.pool.num_free, manager.pool.num_cached) == (10, 3)
    assert take_all(manager) == [5, 6, 7, 8, 9, 3, 4, 2, 1, 0]


@BOTH_INDEXES
def test_hit_on_free_blocks_takes_them_out_of_the_free_order(kind: str) -> None:
    manager = make_manager(kind)
    first = make_sequence(1, [*COMMON, *range(7)])
    admit(manager, first)
    release(manager, first)
    again = make_sequence(2, [*COMMON, *range(7)])
    assert admit(manager, again) == [0, 1, 2]
    assert again.block_table == [0, 1, 2, 4]
    assert take_all(manager) == [5, 6, 7, 8, 9, 3]


@BOTH_INDEXES
def test_eviction_loses_the_tail_and_keeps_the_head(kind: str) -> None:
    manager = make_manager(kind, num_blocks=4)
    first = make_sequence(1, [*COMMON, *range(7)])
    admit(manager, first)
    release(manager, first)
    manager.pool.take(2)  # the vacant one, and the tail of the chain
    assert manager.match(make_sequence(2, [*COMMON, 9]))[0] == [0, 1]


@BOTH_INDEXES
def test_chain_freed_earlier_is_evicted_before_one_freed_later(kind: str) -> None:
    manager = make_manager(kind, num_blocks=4)
    first, second = make_sequence(1, 32), make_sequence(2, 32)
    admit(manager, first)
    admit(manager, second)
    release(manager, second)
    release(manager, first)
    assert take_all(manager) == [3, 2, 1, 0]


@BOTH_INDEXES
def test_hit_makes_a_chain_recent_again(kind: str) -> None:
    manager = make_manager(kind, num_blocks=5)
    first, second = make_sequence(1, 32), make_sequence(2, 32)
    admit(manager, first)
    admit(manager, second)
    release(manager, first)
    release(manager, second)
    again = make_sequence(3, [*first.token_ids, 1])
    admit(manager, again)
    release(manager, again)
    assert take_all(manager) == [4, 3, 2, 1, 0]


def test_match_claims_nothing() -> None:
    manager = make_manager()
    seq = make_sequence(1, [*COMMON, 1])
    admit(manager, seq)
    before = refs(manager)
    assert manager.match(make_sequence(2, [*COMMON, 2]))[0] == [0, 1, 2]
    assert refs(manager) == before
    assert (manager.num_prefix_queries, manager.num_prefix_hits) == (49, 0)


def test_what_does_not_fit_changes_nothing() -> None:
    manager = make_manager(num_blocks=6)
    admit(manager, make_sequence(1, [*COMMON, 1]))
    before = refs(manager)
    hits, _ = manager.match(make_sequence(2, [*COMMON, *range(40)]))
    assert not manager.can_allocate(hits, 6, 0)
    assert (refs(manager), manager.pool.num_free) == (before, 2)


def test_hits_in_use_cost_nothing() -> None:
    manager = make_manager(num_blocks=6)
    admit(manager, make_sequence(1, [*COMMON, 1]))
    assert manager.can_allocate([0, 1, 2], 5, 0)


def test_free_hits_count_against_the_free_blocks() -> None:
    manager = make_manager(num_blocks=6)
    seq = make_sequence(1, [*COMMON, 1])
    admit(manager, seq)
    release(manager, seq)
    manager.pool.take(1)
    assert manager.can_allocate([0, 1, 2], 5, 0)
    assert not manager.can_allocate([0, 1, 2], 6, 0)


def test_spare_blocks_must_stay_free() -> None:
    manager = make_manager(num_blocks=6)
    assert manager.can_allocate([], 4, 2)
    assert not manager.can_allocate([], 4, 3)


@BOTH_INDEXES
@pytest.mark.parametrize(("num_tokens", "num_hits"), [(16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (49, 3)])
def test_hits_leave_a_token_to_compute(kind: str, num_tokens: int, num_hits: int) -> None:
    manager = make_manager(kind)
    admit(manager, make_sequence(1, [*COMMON, 1]))
    hits, _ = manager.match(make_sequence(2, [*COMMON, 1][:num_tokens]))
    assert hits == [0, 1, 2][:num_hits]


@BOTH_INDEXES
def test_generated_tokens_are_published_only_when_they_fill_a_block(kind: str) -> None:
    manager = make_manager(kind)
    seq = make_sequence(1, 14)
    admit(manager, seq)
    published = []
    for computed in range(15, 18):
        seq.token_ids.append(computed)
        if computed >= seq.publish_at:
            manager.publish(seq, computed)
        published.append(manager.index.holds(0))
    assert published == [False, True, True]


@BOTH_INDEXES
def test_next_block_is_due_when_it_is_full(kind: str) -> None:
    manager = make_manager(kind)
    seq = make_sequence(1, 40)
    hits, anchor = manager.match(seq)
    manager.allocate(seq, hits, anchor, 3)
    assert seq.publish_at == 16
    manager.publish(seq, 33)
    assert seq.publish_at == 48


def test_nothing_is_ever_due_without_a_prefix_cache() -> None:
    manager = make_manager(enable_prefix_caching=False)
    seq = make_sequence(1, 40)
    admit(manager, seq)
    assert seq.publish_at == NEVER
    assert manager.match(make_sequence(2, seq.token_ids)) == ([], None)


def test_grow_appends_fresh_blocks() -> None:
    manager = make_manager()
    seq = make_sequence(1, 20)
    admit(manager, seq)
    assert manager.grow(seq, 2) == [2, 3]
    assert (seq.block_table, seq.num_block_tokens) == ([0, 1, 2, 3], 64)


def test_unbind_leaves_the_blocks_to_the_caller() -> None:
    manager = make_manager()
    seq = make_sequence(1, 20)
    admit(manager, seq)
    held = manager.unbind(seq)
    assert held == ([0, 1], -1)
    assert (seq.block_table, seq.num_block_tokens, manager.pool.num_free) == ([], 0, 8)


def test_giving_back_twice_raises() -> None:
    manager = make_manager()
    seq = make_sequence(1, 20)
    admit(manager, seq)
    held = manager.unbind(seq)
    manager.give_back(*held)
    with pytest.raises(RuntimeError, match="block 1 is freed twice"):
        manager.give_back(*held)


def test_fork_shares_the_blocks_of_the_given_tokens() -> None:
    manager = make_manager()
    parent, child = make_sequence(1, 50), make_sequence(2, 50)
    admit(manager, parent)
    manager.fork(parent, child, 33)
    assert child.block_table == [0, 1, 2]
    assert refs(manager)[:4] == [2, 2, 2, 1]


def test_fork_of_a_fork_counts_a_third_holder() -> None:
    manager = make_manager()
    parent, child, grandchild = make_sequence(1, 20), make_sequence(2, 20), make_sequence(3, 20)
    admit(manager, parent)
    manager.fork(parent, child, 20)
    manager.fork(child, grandchild, 20)
    release(manager, parent)
    assert refs(manager)[:2] == [2, 2]


def test_shared_block_is_replaced_and_its_source_left_to_the_caller() -> None:
    manager = make_manager()
    parent, child = make_sequence(1, 20), make_sequence(2, 20)
    admit(manager, parent)
    manager.fork(parent, child, 20)
    assert manager.make_writable(child, 1) == (1, 2)
    assert (parent.block_table, child.block_table) == ([0, 1], [0, 2])
    assert refs(manager)[:3] == [2, 2, 1], "the source is pinned until the caller gives it back"
    manager.pool.give([1])
    assert refs(manager)[:3] == [2, 1, 1]


def test_block_is_shared_while_another_table_holds_it() -> None:
    manager = make_manager()
    parent, child = make_sequence(1, 20), make_sequence(2, 20)
    admit(manager, parent)
    assert not manager.is_shared(parent, 1, [])
    manager.fork(parent, child, 20)
    assert manager.is_shared(parent, 1, [])
    assert not manager.is_shared(parent, 1, [1]), "a pin is no holder"
    assert not manager.is_shared(parent, 2, []), "its table ends before"


def test_swap_out_names_the_computed_blocks_only() -> None:
    manager = make_manager(num_host_blocks=3)
    seq = make_sequence(1, 50)
    admit(manager, seq)
    seq.num_computed_tokens = 33
    assert manager.swap_out(seq) == [(0, 0), (1, 1), (2, 2)]
    assert seq.host_block_table == [0, 1, 2]


def test_swap_in_brings_the_content_to_fresh_blocks() -> None:
    manager = make_manager(num_host_blocks=3)
    seq = make_sequence(1, 33)
    admit(manager, seq)
    manager.swap_out(seq)
    release(manager, seq)
    manager.pool.take(2)
    assert manager.swap_in(seq, 4) == [(0, 5), (1, 6), (2, 7)]
    assert (seq.block_table, seq.host_block_table) == ([5, 6, 7, 8], [])


@pytest.mark.parametrize(("num_host_blocks", "expected"), [(1, False), (2, True)])
def test_swap_needs_host_blocks_for_what_is_computed(num_host_blocks: int, expected: bool) -> None:
    manager = make_manager(num_host_blocks=num_host_blocks)
    seq = make_sequence(1, 20)
    admit(manager, seq)
    assert manager.can_swap_out(seq) is expected


def test_counters_of_look_ups() -> None:
    manager = make_manager()
    admit(manager, make_sequence(1, [*COMMON, 1]))
    admit(manager, make_sequence(2, [*COMMON, 2, 3]))
    assert (manager.num_prefix_queries, manager.num_prefix_hits) == (49 + 50, 48)


@pytest.mark.parametrize(
    ("held", "host_held", "message"),
    [({0: 1}, {}, "block 1: 1 references counted, 0 held"), ({0: 1, 1: 1}, {0: 1}, "block 0: 0 references counted")],
)
def test_integrity_check_compares_with_what_is_held(held: dict, host_held: dict, message: str) -> None:
    manager = make_manager(num_host_blocks=2)
    admit(manager, make_sequence(1, 20))
    with pytest.raises(RuntimeError, match=message):
        exhaust(manager.integrity_slices(held, host_held, 0))
