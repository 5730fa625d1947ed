"""Stop token sequences, matched backwards from the last token."""

from bisect import bisect_right
from collections.abc import Sequence as Seq

from worker.core.tokens import token_array


class StopSequences:
    """Of one request. They may be many and long, and a step has hundreds of rows.

    Each is kept last token first, so that "ends with" becomes "begins with", and as memory. They are sorted, and those
    that begin with another one are left out, since that one matches whenever they do: so all that lies between a
    sequence and a text that begins with it is gone, and the one to look at is the last that is not above the text.
    """

    __slots__ = ("_backwards", "last_token_ids", "longest")

    def __init__(self, sequences: tuple[tuple[int, ...], ...]) -> None:
        """`sequences`: none of them empty."""
        self.last_token_ids = frozenset(sequence[-1] for sequence in sequences)
        """Nothing matches unless the last token is one of these."""
        self.longest = max(map(len, sequences), default=0)
        """Tokens of the longest one; 0 if there are none."""
        self._backwards: list[bytes] = []
        for backwards in sorted(token_array(sequence[::-1]).tobytes() for sequence in sequences):
            if not self._backwards or not backwards.startswith(self._backwards[-1]):
                self._backwards.append(backwards)

    def match_end(self, token_ids: Seq[int]) -> bool:
        """Whether `token_ids` end with one of them."""
        text = token_array(token_ids[::-1]).tobytes()
        at = bisect_right(self._backwards, text)
        return at > 0 and text.startswith(self._backwards[at - 1])
