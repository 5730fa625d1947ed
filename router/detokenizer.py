"""Token ids to text, a few at a time.

The pieces joined equal decoding all ids at once, and no piece ends inside a character. Two ways:

- `ByteDetokenizer` for byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM2, DeepSeek …): every token is a fixed string
  of bytes, so text is an incremental UTF-8 decoder over table look-ups. Exact for all inputs.
- `WindowDetokenizer` for all others (byte fallback, metaspace, WordPiece): what a token looks like depends on its
  neighbours, so the tokenizer decodes a short window, and the text of its older part is cut off. Where a run of byte
  tokens turns out invalid after a part of it was shown, the rest is replaced by U+FFFD alone.

A character still incomplete at the end becomes exactly one U+FFFD.
"""

import codecs
import json
from collections.abc import Callable, Sequence, Set
from typing import Protocol

import tokenizers

REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4
"""Each token has at least one byte: what is no character after as many tokens never becomes one."""


class Detokenizer(Protocol):
    """State of one completion."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that became complete with these tokens; may be empty."""

    def flush(self) -> str:
        """The rest, at the end."""


class ByteDetokenizer:
    """`table[id]` are the bytes of a token; ids beyond it have none."""

    __slots__ = ("_decoder", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        return self._decoder.decode(b"".join([table[i] for i in token_ids if i < len(table)]))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """`decode` turns ids into text, without skipping anything; ids in `hidden` have no text."""

    __slots__ = ("_decode", "_hidden", "_ids", "_num_held", "_num_shown", "_shown")

    def __init__(self, decode: Callable[[list[int]], str], hidden: Set[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids: list[int] = []
        self._num_shown = 0
        """Tokens at the start of the window whose text was returned; they are context for the others."""
        self._shown = ""
        self._num_held = 0
        """Last tokens in a row that wait for the rest of a character."""

    def feed(self, token_ids: Sequence[int]) -> str:
        # One by one: a run could end inside a character that another one of the same run made long enough to show.
        return "".join([self._feed_one(i) for i in token_ids if i not in self._hidden])

    def _feed_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and self._num_held < _MAX_CHARACTER_BYTES - 1:
            self._num_held += 1
            return ""
        self._num_held = 0
        delta = text[len(self._shown) :]
        if delta:
            self._ids = self._ids[self._num_shown :]
            self._num_shown = len(self._ids)
            self._shown = self._decode(self._ids)
        return delta

    def flush(self) -> str:
        rest = self._decode(self._ids)[len(self._shown) :]
        self._ids, self._num_shown, self._shown = [], 0, ""
        return rest.rstrip(REPLACEMENT) + REPLACEMENT if rest.endswith(REPLACEMENT) else rest


def _bytes_of_characters() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable Latin-1 bytes stand for themselves, the others are numbered from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _bytes_of_characters()


def is_byte_level(tokenizer_json: bytes) -> bool:
    """Whether the tokenizer's decoder is the byte-level one and nothing else."""
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    parts = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type") for part in parts] == ["ByteLevel"]


def token_bytes_table(tokenizer: tokenizers.Tokenizer, byte_level: bool) -> list[bytes]:
    """Bytes of every token by id; holes are empty. Without byte level: of the token alone, metaspace as a space."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
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
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()
