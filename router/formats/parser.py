"""The parser of one answer, and what most formats have in common: thinking, then text with calls in it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from router.formats.events import Event, Output
from router.formats.scanner import EndOfText, Malformed, Markers, Scanner, Steps

Reader: TypeAlias = Callable[[Scanner, Output], Steps[None]]
"""Reads an answer or a part of one."""

THINK, END_THINK = "<think>", "</think>"
NEWLINES = 2
"""So many line ends around the reasoning and after a call are no text: models are trained on templates that put them
there. Those before a call are text: to hold them back would hold back the stop strings that they are part of."""
_END_OF_REASONING = Markers(END_THINK, newlines=NEWLINES)


class AnswerParser:
    """Text of one answer in, events out. The joined events do not depend on how the text was cut into pieces."""

    __slots__ = ("_output", "_scanner", "_steps")

    def __init__(self, read: Reader, *, is_reasoning: bool = False) -> None:
        self._scanner = Scanner()
        self._output = Output(is_reasoning=is_reasoning)
        self._steps = read(self._scanner, self._output)

    @property
    def is_reasoning(self) -> bool:
        """What comes next is reasoning, as far as the text so far tells."""
        return self._output.is_reasoning

    def feed(self, text: str) -> list[Event]:
        self._scanner.text += text
        next(self._steps)
        return self._output.take()

    def flush(self) -> list[Event]:
        """The text is over: what was held back. The parser is used up."""
        self._scanner.is_over = True
        try:
            next(self._steps)
        except EndOfText:
            rest = self._scanner.take_all()
            if self._output.is_reasoning:
                self._output.reasoning(rest)
            else:
                self._output.content(rest)
        return self._output.take()


@dataclass(frozen=True, slots=True)
class Calls:
    """How calls are written."""

    opening: str
    read: Reader
    """From after `opening` to the end of the call. Raises Malformed."""
    around: tuple[str, ...] = ()
    """Markers around calls that say nothing."""


def answer_reader(calls: Calls, *, thinks: bool = True) -> Reader:
    """Reasoning is read at the beginning only: later, the tags are text. A call inside of reasoning is text, too."""
    markers = Markers(calls.opening, *calls.around)

    def read(scanner: Scanner, output: Output) -> Steps[None]:
        if thinks and ((yield from _opens(scanner)) or output.is_reasoning):
            output.is_reasoning = True
            yield from scanner.drop_newlines(NEWLINES)
            yield from scanner.text_until(_END_OF_REASONING, output.reasoning)
            output.is_reasoning = False
            yield from scanner.drop_newlines(NEWLINES)
        while True:
            marker = yield from scanner.text_until(markers, output.content)
            if marker == calls.opening:
                try:
                    yield from calls.read(scanner, output)
                except Malformed:
                    output.content(scanner.take())
                    continue
            yield from scanner.drop_newlines(NEWLINES)

    return read


def _opens(scanner: Scanner) -> Steps[bool]:
    """Whether the reasoning's opening tag comes first. White space before other text is given back."""
    try:
        yield from scanner.expect(THINK)
    except Malformed:
        scanner.at = 0
        return False
    return True
