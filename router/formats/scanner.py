"""Reading text that comes in pieces.

Formats are written as generators that read a `Scanner` from the front and yield where they need more text. They decide
by the text alone, never by how it was cut, so any cut gives the same events.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields when more text is needed; returns a T."""

_SPACE = re.compile(r"\s*")
MAX_WORD = 128
"""Characters. In prose without spaces, a word would have no end."""
_WORD = re.compile(rf"[^\s<>]{{0,{MAX_WORD + 1}}}")


class EndOfText(Exception):
    """The text is over where more was needed."""


class Malformed(Exception):
    """What was read is not in the format. Everything before `Scanner.at` was looked at, nothing after it."""


class Markers:
    """Strings that are no text; none may begin another. Up to `newlines` line ends before one belong to it."""

    __slots__ = ("_begun", "_complete", "_longest", "is_possible")

    def __init__(self, *markers: str, newlines: int = 0) -> None:
        before = f"\n{{0,{newlines}}}"
        any_of = "|".join(re.escape(marker) for marker in markers)
        prefixes = "|".join(_proper_prefix(marker) for marker in markers)
        self._complete = re.compile(f"{before}({any_of})")
        self._begun = re.compile(f"(?:{before}(?:{prefixes}))\\Z" + (f"|\n{{1,{newlines}}}\\Z" if newlines else ""))
        self._longest = newlines + max(map(len, markers))
        first = re.escape("".join({marker[0] for marker in markers}) + ("\n" if newlines else ""))
        self.is_possible = re.compile(f"[{first}]").search
        """Whether a text can have anything of a marker at all. Most have not."""

    def search(self, text: str) -> re.Match[str] | None:
        """The first marker; group 1 is it without line ends."""
        return self._complete.search(text)

    def held_from(self, text: str) -> int:
        """Where the end of `text` may be the beginning of a marker; its length when nowhere."""
        begun = self._begun.search(text, max(0, len(text) - self._longest))
        return begun.start() if begun else len(text)


def _proper_prefix(marker: str) -> str:
    """A pattern of all beginnings of `marker`."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(marker[0]) + pattern


class Scanner:
    """`text` up to `at` has been read. It can still be given back, until it is taken."""

    __slots__ = ("at", "is_over", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_over = False
        """No more text will come."""

    def take(self) -> str:
        """What was read since the last time; it is gone here."""
        taken, self.text, self.at = self.text[: self.at], self.text[self.at :], 0
        return taken

    def take_all(self) -> str:
        self.at = len(self.text)
        return self.take()

    def more(self) -> Steps[None]:
        """Wait for more text. Raises EndOfText."""
        if self.is_over:
            raise EndOfText
        yield

    def peek(self) -> Steps[str]:
        """The next character that is no white space; what was before it is read."""
        while True:
            space = _SPACE.match(self.text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            yield from self.more()

    def expect(self, *markers: str) -> Steps[str]:
        """Read white space and then one of `markers`, which is returned. Raises Malformed when something else comes."""
        yield from self.peek()
        longest = max(map(len, markers))
        while True:
            for marker in markers:
                if self.text.startswith(marker, self.at):
                    self.at += len(marker)
                    return marker
            begun = self.text[self.at : self.at + longest]
            if not any(marker.startswith(begun) for marker in markers):
                raise Malformed
            yield from self.more()

    def expect_end(self, *markers: str) -> Steps[str]:
        """As `expect`, where everything that counts was read: of a text that is over before, nothing is left."""
        try:
            return (yield from self.expect(*markers))
        except EndOfText:
            self.take_all()
            raise

    def word(self) -> Steps[str]:
        """Read white space and then what is neither white space nor an angle bracket. Raises Malformed when there is
        nothing of it, or more than MAX_WORD."""
        yield from self.peek()
        while True:
            found = _WORD.match(self.text, self.at)
            end = found.end() if found else self.at
            if end < len(self.text) or end - self.at > MAX_WORD:
                break
            yield from self.more()
        if not 0 < end - self.at <= MAX_WORD:
            raise Malformed
        word, self.at = self.text[self.at : end], end
        return word

    def until(self, marker: str) -> Steps[str]:
        """Read up to and including `marker`; returns what was before it."""
        start = search_from = self.at
        while (found := self.text.find(marker, search_from)) < 0:
            search_from = max(start, len(self.text) - len(marker) + 1)
            yield from self.more()
        self.at = found + len(marker)
        return self.text[start:found]

    def text_until(self, markers: Markers, emit: Callable[[str], None]) -> Steps[str]:
        """Emit text as it comes, up to the first marker. That is read, not taken, and returned. Raises EndOfText once
        everything is emitted."""
        while True:
            while markers.is_possible(self.text) is None:
                self.at = len(self.text)
                emit(self.take())
                yield from self.more()
            found = markers.search(self.text)
            if found:
                self.at = found.start()
                emit(self.take())
                self.at = found.end() - found.start()
                return found[1]
            self.at = len(self.text) if self.is_over else markers.held_from(self.text)
            emit(self.take())
            yield from self.more()

    def drop_newlines(self, most: int) -> Steps[None]:
        """Drop what was read, and line ends after it."""
        self.take()
        for _ in range(most):
            while not self.text:
                yield from self.more()
            if self.text[0] != "\n":
                return
            self.text = self.text[1:]
