"""Token ids to text, a few at a time.

The pieces joined are what decoding prompt and completion at once adds to decoding the prompt, and no piece ends inside
a character. Three ways:

- `ByteDetokenizer` for byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM2, DeepSeek …): every token is a fixed string
  of bytes, so text is an incremental UTF-8 decoder over table look-ups.
- `FallbackDetokenizer` for SentencePiece with byte fallback (Llama 2, Gemma, Mistral): a run of byte tokens is text
  where the whole of it is UTF-8, else U+FFFD for each of its bytes.
- `WindowDetokenizer` for all others (metaspace, WordPiece …).

In the last two, what a token looks like depends on those before it, so the tokenizer decodes a short window, and the
text of its older part is cut off. A character still incomplete at the end becomes exactly one U+FFFD.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import dropwhile, islice, takewhile
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4
MAX_HELD_BYTES = 64
"""Of a run of byte tokens that may still turn out to be no text: what is longer is shown as it comes."""
_MAX_WINDOW = 64
"""Tokens. Only a long row of U+FFFD fills it."""

Decode = Callable[[list[int]], str]
"""Ids to text, without skipping anything."""


class Detokenizer(Protocol):
    """State of one completion."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that became complete with these tokens; may be empty."""

    def flush(self) -> str:
        """The rest, at the end."""


def last_shown(prompt: Sequence[int], hidden: Set[int], most: int = MAX_HELD_BYTES + 1) -> list[int]:
    """The last tokens of a prompt that have text: as many as the text of what follows can depend on."""
    return list(islice((i for i in reversed(prompt) if i not in hidden), most))[::-1]


class ByteDetokenizer:
    """`table[id]` are the bytes of a token; ids beyond it have none. `prompt`: its last tokens with text."""

    __slots__ = ("_begun", "_table")

    def __init__(self, table: Sequence[bytes], prompt: Sequence[int] = ()) -> None:
        self._table = table
        self._begun = b""
        """A character that is not complete, of the prompt at first."""
        self.feed(prompt[-MAX_CHARACTER_BYTES:])

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        data = b"".join([self._begun, *[table[i] for i in token_ids if i < len(table)]])
        text, num_bytes = codecs.utf_8_decode(data, "replace", False)
        self._begun = data[num_bytes:]
        return text

    def flush(self) -> str:
        begun, self._begun = self._begun, b""
        return begun.decode(errors="replace")


class WindowDetokenizer:
    """Ids in `hidden` have no text. `prompt`: its last tokens with text."""

    __slots__ = ("_decode", "_hidden", "_ids", "_num_context", "_shown")

    def __init__(self, decode: Decode, hidden: Set[int] = frozenset(), prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids: list[int] = []
        self._num_context = 0
        """Tokens at the start of the window that are there for the others only."""
        self._shown = ""
        """What was returned of the window's text, or is the prompt's."""
        self._start(prompt)

    def _start(self, prompt: Sequence[int]) -> None:
        self.feed(prompt)
        self._shown = self._decode(self._ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        # One by one: a run could end inside a character that another one of the same run made long enough to show.
        return "".join([self._feed_one(i) for i in token_ids if i not in self._hidden])

    def _feed_one(self, token_id: int) -> str:
        """The last U+FFFD may be the beginning of a character."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        is_held = text.endswith(REPLACEMENT)
        delta = self._show(text[:-1] if is_held else text)
        if is_held and len(self._ids) > _MAX_WINDOW:
            self._ids = self._ids[-MAX_CHARACTER_BYTES:]
            self._num_context, self._shown = 0, self._decode(self._ids)[:-1]
        elif delta and not is_held:
            self._move()
        return delta

    def _show(self, text: str) -> str:
        """The window's text so far is `text`: what is new of it."""
        num_before = len(self._shown)
        if not text.startswith(self._shown):
            # A character that the prompt has begun is new where it is whole; what was broken before it is the prompt's.
            num_before = max(len(self._shown.rstrip(REPLACEMENT)), _common_length(text, self._shown))
        delta = text[num_before:]
        if delta:
            self._shown = text
        return delta

    def _move(self) -> None:
        """Everything was shown: tokens that were there before the last ones are no context any more."""
        self._ids = self._ids[self._num_context :]
        self._num_context = len(self._ids)
        self._shown = self._decode(self._ids)

    def flush(self) -> str:
        return self._show(self._decode(self._ids))


class FallbackDetokenizer(WindowDetokenizer):
    """`byte_of`: the byte of each token that is one.

    A run of them is held back until another token ends it, as a byte to come could break it; at most MAX_HELD_BYTES.
    With `is_eager` a character comes with the token that completes it, and what breaks a run spoils only what is not
    complete: whoever looks for stop strings must not see them a token late, or not at all."""

    __slots__ = ("_byte_of", "_is_broken", "_is_cut", "_is_eager", "_run")

    def __init__(
        self,
        decode: Decode,
        byte_of: Mapping[int, int],
        hidden: Set[int] = frozenset(),
        prompt: Sequence[int] = (),
        *,
        is_eager: bool = False,
    ) -> None:
        self._byte_of = byte_of
        self._is_eager = is_eager
        self._run = bytearray()
        """What is held back of the run; its tokens are the last ones of the window."""
        self._is_cut = False
        """A part of the run was returned, or is the prompt's: the rest comes character by character."""
        self._is_broken = False
        """The run is no UTF-8, whatever comes: each of its bytes is U+FFFD."""
        super().__init__(decode, hidden, prompt)

    def _start(self, prompt: Sequence[int]) -> None:
        """Whole characters of a run at the prompt's end are the prompt's, whatever comes. The run may have begun before
        `prompt`, in the midst of a character."""
        self.feed(list(dropwhile(self._continues_character, prompt)))
        if self._run and not self._is_broken:
            self._show_run(_complete_length(self._run) or 0)

    def _continues_character(self, token_id: int) -> bool:
        return 0x80 <= self._byte_of.get(token_id, 0) < 0xC0

    def _feed_one(self, token_id: int) -> str:
        byte = self._byte_of.get(token_id)
        if byte is not None:
            return self._feed_byte(token_id, byte)
        text = self._end_run()
        self._ids.append(token_id)
        delta = self._show(self._decode(self._ids))
        if delta:
            self._move()
        return text + delta

    def _feed_byte(self, token_id: int, byte: int) -> str:
        if self._is_broken:
            self._ids = [token_id]
            return REPLACEMENT
        self._ids.append(token_id)
        self._run.append(byte)
        num_complete = _complete_length(self._run)
        if num_complete is None:
            self._is_broken = True
            return self._lose_run()
        is_shown = self._is_eager or self._is_cut or len(self._run) > MAX_HELD_BYTES
        return self._show_run(num_complete) if is_shown else ""

    def _show_run(self, num_bytes: int) -> str:
        """Return and forget the run up to there, which is the end of a character."""
        shown = self._run[:num_bytes].decode()
        del self._run[:num_bytes]
        if not self._is_cut:  # the beginning of a text may lose a space
            shown = self._show(self._decode(self._ids[: len(self._ids) - len(self._run)]))
        self._is_cut = True
        return shown

    def _lose_run(self) -> str:
        num_lost = len(self._run)
        self._run.clear()
        return REPLACEMENT * num_lost

    def _end_run(self) -> str:
        """A token that is no byte comes."""
        if not (self._run or self._is_cut or self._is_broken):
            return ""
        is_whole = not self._is_broken and _complete_length(self._run) == len(self._run)
        text = self._show_run(len(self._run)) if is_whole else self._lose_run()
        self._is_cut = self._is_broken = False
        self._ids = self._ids[-1:]
        self._num_context, self._shown = 1, self._decode(self._ids)
        return text

    def flush(self) -> str:
        text = "" if self._is_broken else self._show_run(_complete_length(self._run) or 0)
        return text + REPLACEMENT if self._run else text


def _common_length(one: str, other: str) -> int:
    """Characters that they begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _complete_length(run: bytes | bytearray) -> int | None:
    """How many bytes of a run are whole characters; None when it is no UTF-8, whatever comes after it."""
    try:
        return codecs.utf_8_decode(run, "strict", False)[1]
    except UnicodeDecodeError:
        return None
