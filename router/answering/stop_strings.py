"""Stop strings in a stream of text.

One Knuth-Morris-Pratt automaton per stop string: after each character its state is the length of the longest prefix of
the stop that the text ends with. So the result does not depend on how the text was cut into pieces, each character
costs the same however long the stops are, and what must be held back is exactly the largest state. A piece of text in
which no stop begins, as most are, is passed on without a look at its characters.

The stop that is complete first wins; of several complete at the same character, the longest.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(slots=True)
class Released:
    """`text` may be shown now. `stop` is set when the text has ended there."""

    text: str
    stop: str | None = None


class _Automaton:
    __slots__ = ("failure", "pattern", "state")

    def __init__(self, pattern: str, failure: Sequence[int]) -> None:
        self.pattern = pattern
        self.failure = failure
        self.state = 0

    def step(self, char: str) -> bool:
        """True when the pattern is complete."""
        state = self.state
        while state and self.pattern[state] != char:
            state = self.failure[state - 1]
        if self.pattern[state] == char:
            state += 1
        complete = state == len(self.pattern)
        self.state = self.failure[-1] if complete else state
        return complete


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of `pattern`: length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = table[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        table[position] = length
    return table


@lru_cache(64)
def _compiled(stops: tuple[str, ...]) -> tuple[Sequence[tuple[str, Sequence[int]]], re.Pattern[str]]:
    """Each stop with its table, the longest first, and what finds where any of them begins. Requests of one application
    have the same ones."""
    tables = [(stop, _failure_table(stop)) for stop in sorted(stops, key=len, reverse=True)]
    return tables, re.compile("|".join(re.escape(stop[0]) for stop in stops) or r"(?!)")


class StopMatcher:
    """Finds the first of `stops` (each non-empty) in the text fed to it, and holds back what may become one."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        tables, self._beginning = _compiled(tuple(stops))
        self._automata = [_Automaton(stop, failure) for stop, failure in tables]
        self._include_stop = include_stop
        self._held = ""
        """Empty exactly when every automaton is in state 0."""

    def feed(self, text: str, *, armed: bool = True) -> Released:
        """Add `text`. A stop that becomes complete while not `armed` is ordinary text. After a result with `stop` the
        matcher is used up."""
        if not self._held and not self._beginning.search(text):
            return Released(text)
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            char = buffer[position]
            complete = [a.pattern for a in self._automata if a.step(char)]
            if complete and armed:
                end = position + 1
                keep = end if self._include_stop else end - len(complete[0])
                self._held = ""
                return Released(buffer[:keep], complete[0])
        num_held = max((a.state for a in self._automata), default=0)
        border = len(buffer) - num_held
        self._held = buffer[border:]
        return Released(buffer[:border])

    def flush(self) -> str:
        """The text ended without a stop: what was held back."""
        held, self._held = self._held, ""
        return held
