"""Log probabilities of a completion that its client has not taken yet, kept as bytes: a tenth of what they are as
messages, and a thirtieth of the time. They get the text of their tokens when the client is ready for them."""

from collections.abc import Sequence

from fissile.v1 import PositionLogprobs, TokenLogprobs
from router.answering.logprobs import TokenBytes, with_text


class PendingLogprobs:
    """One for each token that waits."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._waiting: list[bytes] = []
        self._entries_each = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_entries(self) -> int:
        """Of all of them."""
        return len(self._waiting) * self._entries_each

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        self._entries_each = max(self._entries_each, len(positions[0].token_ids))
        self._waiting += [position.SerializeToString() for position in positions]

    def num_within(self, max_entries: int) -> int:
        """How many tokens have no more entries than that together, and at least one."""
        return max(1, max_entries // max(1, self._entries_each))

    def read(self, num_positions: int) -> list[TokenLogprobs]:
        """The first ones; they stay."""
        return with_text(map(PositionLogprobs.FromString, self._waiting[:num_positions]), self._token_bytes)

    def take(self, num_positions: int) -> list[TokenLogprobs]:
        if not self._waiting:
            return []  # as with most requests
        taken = self.read(num_positions)
        del self._waiting[:num_positions]
        return taken
