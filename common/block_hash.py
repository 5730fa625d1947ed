"""The hash chain that names a block of tokens by its content and everything before it.

Worker and router must compute the same numbers: the worker's KV events name blocks by them, the router looks them up.

    hash(block) = xxhash64(parent hash as 8 bytes little endian, token ids as int64 little endian, extra keys)

The parent of the first block is `ROOT_HASH`. Extra keys are tagged and length-prefixed, so that no two of different
kind can be confused, and enter on the first block only: the chain carries them on.
xxhash is not cryptographic: equal hashes are a hint, and whoever serves KV by them compares the tokens as well.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Sequence

import xxhash

HASH_SCHEME = "xxhash64-chain-1"
"""Name of this scheme on the wire. Change it with the function."""

ROOT_HASH = 0
TOKEN_BYTES = 8

BlockHasher = Callable[[bytes], int]
"""Bytes of one block (parent, tokens, extras) → unsigned 64-bit hash."""

default_hasher: BlockHasher = xxhash.xxh64_intdigest


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as consecutive int64, little endian: `TOKEN_BYTES` bytes each.

    In an array of int32 none is negative.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i" and sys.byteorder == "little":
        # As memory, not number by number: every other half of zeros.
        halves = array("i", bytes(len(token_ids) * TOKEN_BYTES))
        halves[::2] = token_ids
        return halves.tobytes()
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(content: bytes, num_tokens: int) -> tuple[int, ...]:
    """The first `num_tokens` of what `pack_tokens` made."""
    return struct.unpack_from(f"<{num_tokens}q", content)


def encode_extra(tag: str, value: bytes) -> bytes:
    """One extra key, unambiguous: ("salt", x) never equals ("lora", x)."""
    name = tag.encode()
    return struct.pack("<II", len(name), len(value)) + name + value


def encode_salt(salt: bytes) -> bytes:
    """Extra bytes of a chain's first block. An empty salt is no salt."""
    return encode_extra("salt", salt) if salt else b""


def decode_salt(content: bytes, num_tokens: int) -> bytes:
    """The salt at the end of a first block's content; empty if it has none."""
    extra = content[num_tokens * TOKEN_BYTES :]
    if not extra:
        return b""
    name_bytes, value_bytes = struct.unpack_from("<II", extra)
    start = 8 + name_bytes
    return extra[start : start + value_bytes]


def hash_block(parent: int, content: bytes, hasher: BlockHasher = default_hasher) -> int:
    """Hash of one block; `content` is its packed tokens, followed by the encoded extras on the first block."""
    return hasher(parent.to_bytes(8, "little") + content)


def hash_chain(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> list[int]:
    """Hashes of all full blocks of `token_ids`, in order. A partial last block has none."""
    hashes: list[int] = []
    extend_chain(hashes, token_ids, block_size, salt)
    return hashes


def extend_chain(
    hashes: list[int], token_ids: Sequence[int], block_size: int, salt: bytes = b"", num_blocks: int | None = None
) -> None:
    """Add to the hashes of the first blocks of `token_ids` those that follow, until there are `num_blocks` or, where
    that is less or not given, all full blocks."""
    num_full = len(token_ids) // block_size
    num_wanted = num_full if num_blocks is None else min(num_blocks, num_full)
    packed = pack_tokens(token_ids[len(hashes) * block_size : num_wanted * block_size])
    num_bytes = block_size * TOKEN_BYTES
    parent, extra = (hashes[-1], b"") if hashes else (ROOT_HASH, encode_salt(salt))
    for start in range(0, len(packed), num_bytes):
        parent = hash_block(parent, packed[start : start + num_bytes] + extra)
        hashes.append(parent)
        extra = b""
