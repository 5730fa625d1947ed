"""Taking, giving and sharing of blocks: exact ids, exact order."""

import itertools

import pytest

from common.block_hash import default_hasher
from worker.core.block_chain import BlockChain
from worker.core.cache.block_pool import BlockPool
from worker.core.cache.hash_index import HashPrefixIndex
from worker.core.cache.prefix_index import PrefixIndex
from worker.core.cache.radix_index import RadixPrefixIndex
from worker.core.slices import exhaust


def chain_of(tokens: list[int], block_size: int = 4) -> BlockChain:
    chain = BlockChain(block_size, b"", default_hasher)
    chain.extend(tokens)
    return chain


@pytest.fixture(params=[HashPrefixIndex, RadixPrefixIndex])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return request.param(6)


def test_vacant_blocks_come_in_order_of_being_given() -> None:
    pool = BlockPool(5, None)
    assert pool.take(3) == [0, 1, 2]
    pool.give([2, 0])
    assert pool.take(4) == [3, 4, 2, 0]


@pytest.mark.parametrize("num_blocks", [0, 1, 5])
def test_pool_of_any_size_gives_all_its_blocks_and_no_more(num_blocks: int) -> None:
    pool = BlockPool(num_blocks, None)
    assert pool.take(num_blocks) == list(range(num_blocks))
    with pytest.raises(RuntimeError, match="1 blocks wanted, 0 free"):
        pool.take(1)


def test_refused_take_changes_nothing(index: PrefixIndex) -> None:
    pool = BlockPool(6, index)
    pool.take(2)
    with pytest.raises(RuntimeError):
        pool.take(5)
    assert pool.num_free == 4
    exhaust(pool.integrity_slices({0: 1, 1: 1}))


def test_double_free_raises() -> None:
    pool = BlockPool(2, None)
    blocks = pool.take(1)
    pool.give(blocks)
    with pytest.raises(RuntimeError, match="block 0 is freed twice"):
        pool.give(blocks)


def test_shared_block_is_free_after_its_last_reference() -> None:
    pool = BlockPool(2, None)
    pool.share(pool.take(1))
    pool.give([0])
    assert pool.num_free == 1
    pool.give([0])
    assert pool.num_free == 2


def test_published_blocks_are_taken_after_vacant_ones_tail_of_a_chain_first(index: PrefixIndex) -> None:
    pool = BlockPool(6, index)
    table = pool.take(3)
    index.publish(chain_of(list(range(12))), table, 0, 3, None)
    pool.give(reversed(table))
    assert pool.num_cached == 3
    assert pool.take(6) == [3, 4, 5, 2, 1, 0]
    assert index.num_evictions == 3


def test_hit_takes_a_free_block_out_of_the_middle(index: PrefixIndex) -> None:
    pool = BlockPool(6, index)
    first, second = pool.take(2), pool.take(2)
    index.publish(chain_of([1] * 8), first, 0, 2, None)
    index.publish(chain_of([2] * 8), second, 0, 2, None)
    pool.give(reversed(first))
    pool.give(reversed(second))
    pool.share([0])
    assert pool.num_free == 5
    assert pool.take(5) == [4, 5, 1, 3, 2]
    exhaust(pool.integrity_slices(dict.fromkeys(range(6), 1)))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_holders_of_a_prefix_let_go_in_any_order(index: PrefixIndex, order: tuple[int, ...]) -> None:
    pool = BlockPool(6, index)
    prefix = pool.take(2)
    index.publish(chain_of([1] * 8), prefix, 0, 2, None)
    pool.share(prefix)
    pool.share(prefix)
    tables = [[*prefix, *pool.take(1)] for _ in range(3)]
    held = [True] * 3
    for at in order:
        pool.give(reversed(tables[at]))
        held[at] = False
        counts: dict[int, int] = {}
        for table in itertools.compress(tables, held):
            for block in table:
                counts[block] = counts.get(block, 0) + 1
        exhaust(pool.integrity_slices(counts))
    assert (pool.num_free, pool.num_cached) == (6, 2)


def test_secure_pool_names_each_block_that_lost_its_content(index: PrefixIndex) -> None:
    pool = BlockPool(6, index, secure=True)
    table = pool.take(3)
    index.publish(chain_of(list(range(8))), table, 0, 2, None)
    pool.give(reversed(table))
    assert pool.take_blocks_to_zero() == [2]
    assert pool.take_blocks_to_zero() == []
    pool.take(5)
    assert pool.take_blocks_to_zero() == [1]


@pytest.mark.parametrize(
    ("held", "message"),
    [({0: 2, 1: 1}, "1 references counted, 2 held"), ({0: 1}, "1 references counted, 0 held")],
)
def test_integrity_check_finds_a_wrong_count(held: dict[int, int], message: str) -> None:
    pool = BlockPool(3, None)
    pool.take(2)
    with pytest.raises(RuntimeError, match=message):
        exhaust(pool.integrity_slices(held))
