"""Known numbers of the hash chain: a router written in another language must find the same ones."""

import struct
from array import array

import pytest
import xxhash

from common.block_hash import (
    HASH_SCHEME,
    ROOT_HASH,
    decode_salt,
    encode_extra,
    encode_salt,
    hash_block,
    hash_chain,
    pack_tokens,
    unpack_tokens,
)


def test_scheme_has_a_name_and_a_root() -> None:
    assert (HASH_SCHEME, ROOT_HASH) == ("xxhash64-chain-1", 0)


def test_tokens_are_int64_little_endian() -> None:
    assert pack_tokens([1, 258, -1]) == (
        b"\x01\0\0\0\0\0\0\0" + b"\x02\x01\0\0\0\0\0\0" + b"\xff\xff\xff\xff\xff\xff\xff\xff"
    )


@pytest.mark.parametrize("tokens", [[], [7], [1, 258, 2**31 - 1, 0]])
def test_array_of_tokens_is_packed_as_a_list_is(tokens: list[int]) -> None:
    assert pack_tokens(array("i", tokens)) == pack_tokens(tokens) == struct.pack(f"<{len(tokens)}q", *tokens)


def test_content_can_be_read_back() -> None:
    content = pack_tokens([3, 1, 2]) + encode_salt(b"tenant")
    assert unpack_tokens(content, 3) == (3, 1, 2)
    assert decode_salt(content, 3) == b"tenant"
    assert decode_salt(pack_tokens([3, 1, 2]), 3) == b""


def test_parent_is_eight_bytes_little_endian() -> None:
    seen: list[bytes] = []

    def spy(data: bytes) -> int:
        seen.append(data)
        return 0

    hash_block(0x0102030405060708, b"tokens", spy)
    assert seen == [b"\x08\x07\x06\x05\x04\x03\x02\x01tokens"]


def test_salt_is_tagged_and_length_prefixed() -> None:
    assert encode_salt(b"ab") == b"\x04\0\0\0\x02\0\0\0saltab"


def test_empty_salt_is_no_salt() -> None:
    assert encode_salt(b"") == b""
    assert hash_chain([1, 2], 2, b"") == hash_chain([1, 2], 2)


@pytest.mark.parametrize("other", [encode_extra("lora", b"x"), encode_extra("sal", b"tx"), encode_extra("salt", b"xx")])
def test_no_other_extra_equals_a_salt(other: bytes) -> None:
    assert other != encode_salt(b"x")


def test_extras_differ_by_where_the_name_ends() -> None:
    assert encode_extra("a", b"bc") != encode_extra("ab", b"c")


@pytest.mark.parametrize(
    ("tokens", "block_size", "salt", "expected"),
    [
        ([1, 2, 3, 4], 4, b"", [0xC784922B20953C58]),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, b"", [0xC784922B20953C58, 0x59A3BEC3CAD906A6]),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, b"tenant", [0x9B9A6F6717805188, 0x859ED61CBC51612A]),
        ([0], 1, b"", [0xAF09F71516247C32]),
        (list(range(32)), 16, b"", [0x4BA97F785A88B166, 0x21D6FAAFF9660B2A]),
    ],
)
def test_known_vectors(tokens: list[int], block_size: int, salt: bytes, expected: list[int]) -> None:
    assert hash_chain(tokens, block_size, salt) == expected


def test_chain_by_xxhash_alone_salted() -> None:
    extra = struct.pack("<II", 4, 6) + b"salt" + b"tenant"
    first = xxhash.xxh64_intdigest(struct.pack("<Q4q", 0, 1, 2, 3, 4) + extra)
    second = xxhash.xxh64_intdigest(struct.pack("<Q4q", first, 5, 6, 7, 8))
    assert hash_chain(list(range(1, 9)), 4, b"tenant") == [first, second]


def test_large_token_ids_and_hashes_of_all_64_bits() -> None:
    tokens = [2**31, 2**40, 2**62]
    assert hash_chain(tokens, 3) == [xxhash.xxh64_intdigest(struct.pack("<Q3q", 0, *tokens))]


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "expected"), [(0, 4, 0), (3, 4, 0), (4, 4, 1), (7, 4, 1), (8, 4, 2), (3, 1, 3)]
)
def test_only_full_blocks_have_a_hash(num_tokens: int, block_size: int, expected: int) -> None:
    assert len(hash_chain(list(range(num_tokens)), block_size)) == expected


def test_equal_blocks_differ_by_what_is_before_them() -> None:
    hashes = hash_chain([7] * 16, 4)
    assert len(set(hashes)) == 4


def test_chains_agree_up_to_where_tokens_do() -> None:
    one, other = hash_chain([1] * 8 + [2] * 4, 4), hash_chain([1] * 8 + [3] * 4, 4)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
