"""A sequence's blocks as the prefix index sees them: each packed once, each hashed once."""

import xxhash

from common.block_hash import ROOT_HASH, encode_salt, hash_chain, pack_tokens
from worker.core.block_chain import BlockChain

TOKENS = list(range(100, 120))


class CountingHasher:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, data: bytes) -> int:
        self.num_calls += 1
        return xxhash.xxh64_intdigest(data)


def make_chain(num_tokens: int, salt: bytes = b"", hasher: CountingHasher | None = None) -> BlockChain:
    chain = BlockChain(4, salt, hasher or CountingHasher())
    chain.extend(TOKENS[:num_tokens])
    return chain


def test_content_is_the_packed_tokens_of_full_blocks() -> None:
    assert make_chain(11).contents == [pack_tokens(TOKENS[:4]), pack_tokens(TOKENS[4:8])]


def test_salt_is_part_of_the_first_content_only() -> None:
    assert make_chain(8, b"x").contents == [pack_tokens(TOKENS[:4]) + encode_salt(b"x"), pack_tokens(TOKENS[4:8])]


def test_salt_is_not_added_again_when_the_chain_grows() -> None:
    chain = BlockChain(4, b"x", CountingHasher())
    for num_tokens in (2, 4, 5, 8, 12):
        chain.extend(TOKENS[:num_tokens])
    assert chain.contents == make_chain(12, b"x").contents


def test_nothing_is_hashed_before_it_is_asked_for() -> None:
    hasher = CountingHasher()
    make_chain(20, hasher=hasher)
    assert hasher.num_calls == 0


def test_each_block_is_hashed_once() -> None:
    hasher = CountingHasher()
    chain = make_chain(20, hasher=hasher)
    for num_blocks in (2, 1, 3, 5, 5, 0):
        chain.hash_up_to(num_blocks)
    assert hasher.num_calls == 5


def test_hashes_are_those_that_the_router_computes() -> None:
    assert make_chain(20, b"x").hash_up_to(5) == hash_chain(TOKENS, 4, b"x")


def test_hashes_are_the_same_however_the_chain_grows() -> None:
    tokens = list(range(100))
    chain = BlockChain(16, b"s", xxhash.xxh64_intdigest)
    for end in (3, 16, 31, 50, 100):
        chain.extend(tokens[:end])
    assert chain.hash_up_to(6) == hash_chain(tokens, 16, b"s")
    assert [chain.parent_hash(number) for number in (0, 3)] == [ROOT_HASH, hash_chain(tokens, 16, b"s")[2]]


def test_parent_of_the_first_block_is_the_root() -> None:
    chain = make_chain(8)
    assert [chain.parent_hash(0), chain.parent_hash(1)] == [ROOT_HASH, hash_chain(TOKENS, 4)[0]]


def test_copy_grows_on_its_own() -> None:
    chain = make_chain(8, b"x")
    chain.hash_up_to(2)
    copy = chain.copy()
    copy.extend([*TOKENS[:8], 7, 7, 7, 7])
    assert (len(chain.contents), len(copy.contents)) == (2, 3)
    assert copy.hash_up_to(3) == hash_chain([*TOKENS[:8], 7, 7, 7, 7], 4, b"x")
    assert chain.hash_up_to(2) == hash_chain(TOKENS[:8], 4, b"x")


def test_copy_of_an_empty_chain_keeps_the_salt() -> None:
    copy = BlockChain(4, b"x", CountingHasher()).copy()
    copy.extend(TOKENS[:4])
    assert copy.hash_up_to(1) == hash_chain(TOKENS[:4], 4, b"x")
