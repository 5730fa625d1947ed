"""What can be hit: by content and parent, never by hash alone. Both implementations."""

import random
import zlib

import pytest

from common.block_hash import default_hasher
from worker.core.block_chain import BlockChain
from worker.core.cache.block_pool import BlockPool
from worker.core.cache.hash_index import HashPrefixIndex
from worker.core.cache.prefix_index import PrefixIndex
from worker.core.cache.radix_index import RadixPrefixIndex
from worker.core.slices import exhaust


def chain_of(tokens: list[int], salt: bytes = b"", hasher=default_hasher) -> BlockChain:
    chain = BlockChain(4, salt, hasher)
    chain.extend(tokens)
    return chain


@pytest.fixture(params=[HashPrefixIndex, RadixPrefixIndex])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return request.param(64)


def hits(index: PrefixIndex, tokens: list[int], salt: bytes = b"", hasher=default_hasher) -> list[int]:
    return index.match(chain_of(tokens, salt, hasher), len(tokens) // 4)[0]


def publish(index: PrefixIndex, tokens: list[int], table: list[int], salt: bytes = b"", hasher=default_hasher):
    return index.publish(chain_of(tokens, salt, hasher), table, 0, len(table), None)


def test_longest_published_prefix_is_found(index: PrefixIndex) -> None:
    publish(index, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3], [5, 6, 7])
    assert hits(index, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]) == [5, 6, 7]
    assert hits(index, [1, 1, 1, 1, 2, 2, 2, 2, 9, 9, 9, 9]) == [5, 6]
    assert hits(index, [1, 1, 1, 1, 2, 2, 2]) == [5]
    assert hits(index, [2, 2, 2, 2]) == []


def test_match_is_capped(index: PrefixIndex) -> None:
    publish(index, list(range(12)), [0, 1, 2])
    assert index.match(chain_of(list(range(12))), 2)[0] == [0, 1]


def test_duplicates_keep_the_existing_block(index: PrefixIndex) -> None:
    publish(index, [1] * 8, [0, 1])
    publish(index, [1] * 8 + [2] * 4, [10, 11, 12])
    assert hits(index, [1] * 8 + [2] * 4) == [0, 1, 12]
    assert not index.holds(10)


def test_chains_branch(index: PrefixIndex) -> None:
    publish(index, [1] * 8 + [2] * 4, [0, 1, 2])
    publish(index, [1] * 8 + [3] * 4, [0, 1, 3])
    publish(index, [1] * 4 + [4] * 4, [0, 4])
    assert hits(index, [1] * 8 + [2] * 4) == [0, 1, 2]
    assert hits(index, [1] * 8 + [3] * 4) == [0, 1, 3]
    assert hits(index, [1] * 4 + [4] * 8) == [0, 4]
    exhaust(index.integrity_slices())


def test_chain_grows_by_steps(index: PrefixIndex) -> None:
    tokens = [1] * 4 + [2] * 4 + [3] * 4
    chain = chain_of(tokens)
    anchor = index.publish(chain, [0, 1, 2], 0, 1, None)
    anchor = index.publish(chain, [0, 1, 2], 1, 2, anchor)
    index.publish(chain, [0, 1, 2], 2, 3, anchor)
    assert hits(index, tokens) == [0, 1, 2]


@pytest.mark.parametrize(("salt", "expected"), [(b"a", [0, 1]), (b"b", []), (b"", [])])
def test_salts_separate(index: PrefixIndex, salt: bytes, expected: list[int]) -> None:
    publish(index, [1] * 8, [0, 1], salt=b"a")
    assert hits(index, [1] * 8, salt) == expected


@pytest.mark.parametrize("kind", [HashPrefixIndex, RadixPrefixIndex])
def test_colliding_hashes_never_hit(kind: type[PrefixIndex]) -> None:
    index = kind(64)
    constant = lambda _: 7  # noqa: E731
    publish(index, [1] * 8, [0, 1], hasher=constant)
    publish(index, [2] * 8, [2, 3], hasher=constant)
    for tokens, salt in [([2] * 8, b""), ([1] * 8, b"salt"), ([3] * 4, b"")]:
        found = hits(index, tokens, salt, constant)
        assert found in ([], [2, 3]), "only its own content"
        assert found == [] or (tokens, salt) == ([2] * 8, b"")
    assert hits(index, [1] * 4 + [2] * 4, hasher=constant) == [0]


def test_second_block_whose_hash_collides_is_not_found_under_another_first() -> None:
    index = HashPrefixIndex(64)
    without_parent = lambda data: zlib.crc32(data[8:])  # noqa: E731
    publish(index, [1] * 4 + [5] * 4, [0, 1], hasher=without_parent)
    publish(index, [2] * 4, [2], hasher=without_parent)
    assert hits(index, [2] * 4 + [5] * 4, hasher=without_parent) == [2]


def test_block_published_anew_is_not_the_parent_that_it_was(index: PrefixIndex) -> None:
    chain = chain_of([1] * 4 + [2] * 4)
    anchor = index.publish(chain, [3, 6], 0, 1, None)
    index.withdraw(3)
    publish(index, [9] * 4, [3])
    index.publish(chain, [5, 6], 1, 2, anchor)
    assert hits(index, [1] * 4 + [2] * 4) == [5, 6]
    assert hits(index, [9] * 4 + [2] * 4) == [3]
    exhaust(index.integrity_slices())


def test_second_block_is_not_found_under_another_first(index: PrefixIndex) -> None:
    publish(index, [1] * 4 + [5] * 4, [0, 1])
    publish(index, [2] * 4, [2])
    assert hits(index, [2] * 4 + [5] * 4) == [2]


def test_eviction_of_a_duplicates_parent_withdraws_what_hangs_on_it(index: PrefixIndex) -> None:
    pool = BlockPool(4, index)
    (first,) = pool.take(1)
    publish(index, [1] * 4, [first])
    other = pool.take(2)
    chain = chain_of([1] * 4 + [2] * 4)
    anchor = index.publish(chain, other, 0, 2, None)
    pool.give([first])  # its content lives on in the other's table, whose second block hangs on it
    pool.take(2)
    assert hits(index, [1] * 4 + [2] * 4) == []
    exhaust(pool.integrity_slices({0: 1, 1: 1, 2: 1, 3: 1}))
    index.publish(chain, other, 2, 2, anchor)
    assert hits(index, [1] * 4 + [2] * 4) == other


def test_radix_evicts_a_leaf_before_what_leads_to_it() -> None:
    index = RadixPrefixIndex(4)
    pool = BlockPool(4, index)
    table = pool.take(4)
    publish(index, list(range(16)), table)
    pool.give(table)  # head first: the least recently given is the root of the others
    assert pool.take(1) == [3]
    assert hits(index, list(range(16))) == [0, 1, 2]


def test_clear_forgets_everything(index: PrefixIndex) -> None:
    pool = BlockPool(64, index)
    table = pool.take(3)
    publish(index, list(range(12)), table)
    pool.give(reversed(table))
    pool.clear_cached()
    assert hits(index, list(range(12))) == []
    assert (pool.num_free, pool.num_cached) == (64, 0)
    exhaust(pool.integrity_slices({}))


def test_snapshot_lists_parents_first(index: PrefixIndex) -> None:
    publish(index, [1] * 8 + [2] * 4, [0, 1, 2])
    publish(index, [1] * 8 + [3] * 4, [0, 1, 3])
    seen = {0}
    for block in index.published():
        assert block.parent_hash in seen
        seen.add(block.hash)
    assert len(seen) == 5


def test_both_indexes_answer_alike_under_random_traffic() -> None:
    """Without eviction they must agree: the same content, so the same hits."""
    rnd = random.Random(3)
    both = HashPrefixIndex(4000), RadixPrefixIndex(4000)
    next_block = 0
    for _ in range(300):
        tokens = [rnd.randrange(2) for _ in range(4 * rnd.randrange(1, 8))]
        found = [hits(index, tokens) for index in both]
        assert found[0] == found[1]
        table = found[0] + list(range(next_block, next_block + len(tokens) // 4 - len(found[0])))
        next_block += len(table)
        for index in both:
            publish(index, tokens, table)
            exhaust(index.integrity_slices())
