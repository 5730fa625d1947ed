"""What a tokenizer's file tells of its tokens: how they are decoded, and which bytes each of them is."""

import json
import re
from collections.abc import Mapping, Sequence


def _bytes_of_characters() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable Latin-1 bytes stand for themselves, the others are numbered from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _bytes_of_characters()
_FALLBACK_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


def decoder_types(tokenizer_json: bytes) -> list[str]:
    """Of the tokenizer's decoder, step by step."""
    decoder = json.loads(tokenizer_json).get("decoder")
    parts = [decoder]
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
    # The library also reads lists of fields in place of objects; what such a part is, nobody here needs to know.
    return [part.get("type", "") if isinstance(part, dict) else "" for part in parts]


def is_byte_level(types: Sequence[str]) -> bool:
    """Whether the decoder is the byte-level one and nothing else."""
    return list(types) == ["ByteLevel"]


def byte_tokens(types: Sequence[str], vocabulary: Mapping[str, int]) -> dict[int, int]:
    """The byte of each token that is one; empty where the decoder does not read them so."""
    if "ByteFallback" not in types:
        return {}
    return {i: byte for piece, i in vocabulary.items() if (byte := _fallback_byte(piece)) is not None}


def token_bytes_table(vocabulary: Mapping[str, int], byte_level: bool) -> list[bytes]:
    """Bytes of every token by id; holes are empty. Without byte level: of the token alone, metaspace as a space."""
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    convert = _byte_level_bytes if byte_level else _piece_bytes
    for piece, token_id in vocabulary.items():
        table[token_id] = convert(piece)
    return table


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:  # an added token outside the alphabet is its own text
        return piece.encode()


def _piece_bytes(piece: str) -> bytes:
    byte = _fallback_byte(piece)
    return piece.replace("\u2581", " ").encode() if byte is None else bytes([byte])


def _fallback_byte(piece: str) -> int | None:
    return int(piece[3:5], 16) if _FALLBACK_PIECE.fullmatch(piece) else None
