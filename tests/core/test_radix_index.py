"""The radix tree: runs split where chains branch, and leaves go before what leads to them. Blocks of 4 tokens."""

import pytest

from common.block_hash import default_hasher
from worker.core.block_chain import BlockChain
from worker.core.block_pool import BlockPool
from worker.core.radix_index import RadixPrefixIndex


def chain_of(*blocks: int) -> BlockChain:
    """A chain of blocks, each of four equal tokens."""
    chain = BlockChain(4, b"", default_hasher)
    chain.extend([token for block in blocks for token in [block] * 4])
    return chain


def publish(index: RadixPrefixIndex, blocks: list[int], table: list[int]) -> None:
    index.publish(chain_of(*blocks), table, 0, len(table), None)
    index.check_integrity()


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
    order = [pool.take(1)[0] for _ in range(4)]
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
    index.check_integrity()
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
