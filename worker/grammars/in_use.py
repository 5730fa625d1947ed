"""The grammars of open sequences: compiled once, and kept as long as one of these sequences is open."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from fissile.errors import ResourceExhaustedError
from worker.core.params import Grammar

MAX_BYTES = 1024**3
"""Of all together, by the estimate below."""
BYTES_EACH, BYTES_PER_CHARACTER = 100_000, 65
RETRY_AFTER_SECONDS = 1.0


@dataclass(slots=True)
class _Use:
    compiled: "Future[None]"
    num_sequences: int = 0


class GrammarsInUse:
    """Used by one thread."""

    def __init__(self, compile: Callable[[Grammar], "Future[None]"], release: Callable[[Grammar], None]) -> None:
        """`compile` is called when a grammar comes into use, `release` when it is used no more."""
        self._compile = compile
        self._release = release
        self._uses: dict[Grammar, _Use] = {}
        self._num_bytes = 0

    def acquire(self, grammars: Iterable[Grammar]) -> None:
        """One for each sequence. Raises ResourceExhaustedError if there is no room; none is taken then."""
        grammars = list(grammars)
        num_bytes = sum(_num_bytes(grammar) for grammar in {*grammars} - self._uses.keys())
        if self._num_bytes + num_bytes > MAX_BYTES:
            raise ResourceExhaustedError(
                f"sampling.structured_output: the {len(self._uses)} grammars of open requests leave no room for it",
                retry_after=RETRY_AFTER_SECONDS,
            )
        self._num_bytes += num_bytes
        for grammar in grammars:
            if grammar not in self._uses:
                self._uses[grammar] = _Use(self._compile(grammar))
            self._uses[grammar].num_sequences += 1

    def compiled(self, grammar: Grammar) -> "Future[None]":
        """Of a grammar in use. Raises GrammarError, or anything else if the worker fails."""
        return self._uses[grammar].compiled

    def release(self, grammar: Grammar) -> None:
        """For a sequence that has ended."""
        use = self._uses[grammar]
        use.num_sequences -= 1
        if use.num_sequences == 0:
            del self._uses[grammar]
            self._num_bytes -= _num_bytes(grammar)
            self._release(grammar)


def _num_bytes(grammar: Grammar) -> int:
    return BYTES_EACH + BYTES_PER_CHARACTER * len(grammar.text)
