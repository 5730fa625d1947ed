"""The radix tree: runs split where chains branch, and leaves go before what leads to them. Blocks of 4 tokens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.block_hash import default_hasher
from worker.core.block_chain import BlockChain
from worker.core.cache.block_pool import BlockPool
from worker.core.cache.radix_index import RadixPrefixIndex
from worker.core.slices import exhaust


def chain_of(*blocks: int) -> BlockChain:
    """A chain of blocks, each of four equal tokens."""
    chain = BlockChain(4, b"", default_hasher)
    chain.extend([token for block in blocks for token in [block] * 4])
    return chain


def publish(index: RadixPrefixIndex, blocks: list[int], table: list[int]) -> None:
    index.publish(chain_of(*blocks), table, 0, len(table), None)
    exhaust(index.integrity_slices())


def hits(index: RadixPrefixIndex, *blocks: int) -> list[int]:
    return index.match(chain_of(*blocks), len(blocks))[0]


def runs(index: RadixPrefixIndex) -> list[list[int]]:
    """Blocks of every node, parents first."""
    return [node.blocks for node in index._collect(index._root) if node.blocks]


@pytest.fixture
def index() -> RadixPrefixIndex:
    return RadixPrefixIndex(16)


def test_chain_without_a_branch_is_one_run(index: RadixPrefixIndex) -> None:
    publish(index, [1, 2, 3], [5, 6, 7])
    assert runs(index) == [[5, 6, 7]]


def test_leaf_grows_in_place(index: RadixPrefixIndex) -> None:
    publish(index, [1, 2], [5, 6])
    publish(index, [1, 2, 3], [5, 6, 7])
    assert runs(index) == [[5, 6, 7]]


def test_branch_splits_the_run_where_the_content_differs(index: RadixPrefixIndex) -> None:
    publish(index, [1, 2, 3], [5, 6, 7])
    publish(index, [1, 2, 4], [5, 6, 8])
    assert sorted(runs(index)) == [[5, 6], [7], [8]]
    assert (hits(index, 1, 2, 3), hits(index, 1, 2, 4)) == ([5, 6, 7], [5, 6, 8])


def test_branch_in_the_first_block_shares_nothing(index: RadixPrefixIndex) -> None:
    publish(index, [1, 2], [5, 6])
    publish(index, [2, 2], [7, 8])
    assert sorted(runs(index)) == [[5, 6], [7, 8]]


def test_prefix_of_a_run_is_found_and_stores_nothing(index: RadixPrefixIndex) -> None:
    publish(index, [1, 2, 3], [5, 6, 7])
    publish(index, [1, 2], [10, 11])
    assert (runs(index), hits(index, 1, 2)) == ([[5, 6, 7]], [5, 6])


def test_branches_of_branches(index: RadixPrefixIndex) -> None:
    publish(index, [1, 2, 3, 4], [0, 1, 2, 3])
    publish(index, [1, 2, 3, 5], [0, 1, 2, 4])
    publish(index, [1, 6], [0, 5])
    assert sorted(runs(index)) == [[0], [1, 2], [3], [4], [5]]
    assert [hits(index, 1, 2, 3, 4), hits(index, 1, 2, 3, 5), hits(index, 1, 6)] == [
        [0, 1, 2, 3],
        [0, 1, 2, 4],
        [0, 5],
    ]


def test_leaves_are_evicted_least_recently_released_first_and_the_trunk_last() -> None:
    index = RadixPrefixIndex(4)
    pool = BlockPool(4, index)
    pool.take(4)
    publish(index, [1, 2, 3], [0, 1, 2])
    publish(index, [1, 2, 4], [0, 1, 3])
    pool.give([3, 2, 1, 0])
    assert [pool.take(1) for _ in range(4)] == [[3], [2], [1], [0]]


def test_trunk_released_first_is_still_evicted_last() -> None:
    index = RadixPrefixIndex(4)
    pool = BlockPool(4, index)
    pool.take(4)
    publish(index, [1, 2, 3], [0, 1, 2])
    publish(index, [1, 2, 4], [0, 1, 3])
    pool.give([0, 1, 2, 3])
    order = pool.take(1)
    assert len(list(index.published())) == 3
    order += [pool.take(1)[0] for _ in range(3)]
    assert sorted(order[:2]) == [2, 3]
    assert order[2:] == [1, 0]


def test_branch_in_use_keeps_its_trunk() -> None:
    index = RadixPrefixIndex(4)
    pool = BlockPool(4, index)
    pool.take(4)
    publish(index, [1, 2, 3], [0, 1, 2])
    publish(index, [1, 2, 4], [0, 1, 3])
    pool.give([2])
    assert pool.take(1) == [2]
    assert (hits(index, 1, 2, 3), hits(index, 1, 2, 4)) == ([0, 1], [0, 1, 3])


def test_withdrawing_the_middle_of_a_run_keeps_its_head(index: RadixPrefixIndex) -> None:
    publish(index, [1, 2, 3], [5, 6, 7])
    assert index.withdraw(6) == [], "all are referenced"
    exhaust(index.integrity_slices())
    assert (runs(index), hits(index, 1, 2, 3)) == ([[5]], [5])


def test_withdrawing_a_trunk_takes_its_branches_along(index: RadixPrefixIndex) -> None:
    pool = BlockPool(16, index)
    pool.take(4)
    publish(index, [1, 2, 3], [0, 1, 2])
    publish(index, [1, 2, 4], [0, 1, 3])
    pool.give([3, 2])
    assert sorted(index.withdraw(0)) == [2, 3]
    assert runs(index) == []


def test_run_whose_tail_was_evicted_grows_again() -> None:
    index = RadixPrefixIndex(4)
    pool = BlockPool(4, index)
    table = pool.take(3)
    publish(index, [1, 2, 3], table)
    pool.give(reversed(table))
    pool.take(2)
    assert hits(index, 1, 2, 3) == [0, 1]
    publish(index, [1, 2, 9], [0, 1, 3])
    assert hits(index, 1, 2, 9) == [0, 1, 3]


@pytest.mark.parametrize("num_wanted", [1, 3, 5])
def test_chain_given_back_tail_first_goes_as_many_blocks_at_once_as_are_wanted(num_wanted: int) -> None:
    index = RadixPrefixIndex(16)
    pool = BlockPool(16, index)
    table = pool.take(5)
    publish(index, [1, 2, 3, 4, 5], table)
    pool.give(reversed(table))
    assert sorted(index.evict(num_wanted)) == table[5 - num_wanted :]
    assert hits(index, 1, 2, 3, 4, 5) == table[: 5 - num_wanted]


def test_leaf_below_a_trunk_released_first_goes_at_once(index: RadixPrefixIndex) -> None:
    pool = BlockPool(16, index)
    table = pool.take(5)
    publish(index, [1, 2, 3, 4, 5], table)
    pool.give(table)
    assert sorted(index.evict(3)) == table[2:]
    assert hits(index, 1, 2, 3) == table[:2]


def test_what_was_released_between_two_blocks_of_a_run_goes_between_them(index: RadixPrefixIndex) -> None:
    pool = BlockPool(16, index)
    first, second = pool.take(2), pool.take(1)
    publish(index, [1, 2], first)
    publish(index, [3], second)
    pool.give([first[1], *second, first[0]])
    assert [index.evict(3), index.evict(3), index.evict(3)] == [[first[1]], second, [first[0]]]


blocks = st.lists(st.integers(0, 1), min_size=1, max_size=5)


@given(
    chains=st.lists(blocks, min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    num_held=st.integers(0, 3),
    num_wanted=st.integers(1, 12),
)
def test_many_at_once_are_those_that_would_go_one_by_one(chains, seed: int, num_held: int, num_wanted: int) -> None:
    left = []
    for takes_all in (True, False):
        index = RadixPrefixIndex(40)
        pool = BlockPool(40, index)
        owned: list[int] = []
        for chain in chains:
            table = pool.take(len(chain))
            publish(index, chain, table)
            owned += table
        random.Random(seed).shuffle(owned)
        pool.give(owned[num_held:])
        pool.take(pool.num_free - pool.num_cached)
        num = min(num_wanted, pool.num_free)
        for size in [num] if takes_all else [1] * num:
            pool.take(size)
        exhaust(index.integrity_slices())
        left.append({block.hash for block in index.published()})
    assert left[0] == left[1]
