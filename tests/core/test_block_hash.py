"""The hash chain that worker and router share."""

import struct

import xxhash

from common.block_hash import (
    ROOT_HASH,
    decode_salt,
    encode_extra,
    encode_salt,
    hash_block,
    hash_chain,
    pack_tokens,
    unpack_tokens,
)
from worker.core.block_chain import BlockChain


def test_hash_is_xxhash64_over_parent_and_int64_tokens() -> None:
    first = xxhash.xxh64_intdigest(struct.pack("<Q4q", 0, 1, 2, 3, 4))
    second = xxhash.xxh64_intdigest(struct.pack("<Q4q", first, 5, 6, 7, 8))
    assert hash_chain([1, 2, 3, 4, 5, 6, 7, 8], 4) == [first, second]


def test_partial_blocks_have_no_hash() -> None:
    assert len(hash_chain(list(range(7)), 4)) == 1
    assert hash_chain([1, 2, 3], 4) == []
    assert len(hash_chain([1, 2, 3], 1)) == 3


def test_salt_enters_the_first_block_and_is_carried_on() -> None:
    plain, salted = hash_chain(list(range(8)), 4), hash_chain(list(range(8)), 4, b"x")
    assert not set(plain) & set(salted)
    packed = pack_tokens(range(8))
    assert salted[0] == hash_block(ROOT_HASH, packed[:32] + encode_salt(b"x"))
    assert salted[1] == hash_block(salted[0], packed[32:])


def test_extras_of_different_kind_differ() -> None:
    assert encode_extra("salt", b"x") != encode_extra("lora", b"x")
    assert encode_extra("a", b"bc") != encode_extra("ab", b"c")


def test_content_can_be_read_back() -> None:
    content = pack_tokens([3, 1, 2]) + encode_salt(b"tenant")
    assert unpack_tokens(content, 3) == (3, 1, 2)
    assert decode_salt(content, 3) == b"tenant"
    assert decode_salt(pack_tokens([3, 1, 2]), 3) == b""


def test_chain_of_a_sequence_gives_the_same_numbers_however_it_grows() -> None:
    tokens = list(range(100))
    chain = BlockChain(16, b"s", xxhash.xxh64_intdigest)
    for end in (3, 16, 31, 50, 100):
        chain.extend(tokens[:end])
    assert chain.hash_up_to(6) == hash_chain(tokens, 16, b"s")
    assert chain.parent_hash(0) == ROOT_HASH
    assert chain.parent_hash(3) == hash_chain(tokens, 16, b"s")[2]
