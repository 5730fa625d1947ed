"""Completions of a request, taken from in turn: an update may have no room for all."""

from collections.abc import Sequence

from router.answering.completion import Completion, Delta


class CompletionsInTurn:
    """From where the last update was cut, if it was."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = completions
        self._next = 0

    def take(self, *, cumulative: bool, max_entries: int) -> tuple[list[Delta], bool]:
        """What is new, with no more entries of log probabilities than that, and whether some of it is left. Raises
        InvalidArgumentError where too much is `cumulative`."""
        first = self._next
        in_turn = [*self._completions[first:], *self._completions[:first]] if first else self._completions
        deltas: list[Delta] = []
        for completion in in_turn:
            if not completion.has_news:
                continue
            self._next = completion.index
            if max_entries <= 0:
                return deltas, True
            num_entries = completion.num_entries
            deltas.append(completion.take(cumulative=cumulative, max_entries=max_entries))
            max_entries -= num_entries
            if completion.has_news:
                return deltas, True
        self._next = 0
        return deltas, False
