"""Log probabilities of a prompt, on their way from a worker to a client.

Those of a long prompt are larger than a message and come and go in parts. What waits for the client is kept as bytes, a
fraction of what it takes as messages, and gets the text of its tokens when the client is ready for it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fissile.v1 import PositionLogprobs, RequestOutput, TokenLogprobs
from router.answering.completion import TokenGapError
from router.answering.logprobs import TokenBytes, with_text

MAX_PART_ENTRIES = 8192
"""In one message to a client. Writing their text takes some ten milliseconds of the event loop."""

_ENTRY_BYTES = 12


@dataclass(slots=True)
class _Part:
    data: bytes
    """Messages whose bytes follow each other are one message."""
    num_entries: int


class PromptLogprobs:
    """One for each prompt token but the first."""

    def __init__(self, num_expected: int, token_bytes: TokenBytes) -> None:
        self._num_expected = num_expected
        self._token_bytes = token_bytes
        self._num_accepted = 0
        self._parts: deque[_Part] = deque()

    @property
    def is_complete(self) -> bool:
        """All of them have come."""
        return self._num_accepted == self._num_expected

    @property
    def num_parts(self) -> int:
        """That wait for the client."""
        return len(self._parts)

    @property
    def num_bytes(self) -> int:
        """Of these."""
        return sum(part.num_entries for part in self._parts) * _ENTRY_BYTES

    def accept(self, output: RequestOutput) -> None:
        """Repeated ones are dropped: another worker begins again. Raises TokenGapError on missing ones."""
        repeated = self._num_accepted - output.prompt_logprobs_offset
        if repeated < 0:
            raise TokenGapError(f"expected prompt logprob {self._num_accepted}, got {output.prompt_logprobs_offset}")
        new = output.prompt_logprobs[repeated : repeated + self._num_expected - self._num_accepted]
        if not new:
            return
        self._num_accepted += len(new)
        data = RequestOutput(prompt_logprobs=new).SerializeToString()
        num_entries = len(new) * len(new[0].token_ids)
        last = self._parts[-1] if self._parts else None
        if last is not None and last.num_entries + num_entries <= MAX_PART_ENTRIES:
            last.data += data
            last.num_entries += num_entries
        else:
            self._parts.append(_Part(data, num_entries))

    def take(self) -> list[TokenLogprobs]:
        """The next part, with the text of its tokens; [] if none waits."""
        if not self._parts:
            return []
        return with_text(RequestOutput.FromString(self._parts.popleft().data).prompt_logprobs, self._token_bytes)


def prompt_logprob_bytes(positions: Sequence[PositionLogprobs]) -> int:
    """What they take while they wait, by estimate."""
    return len(positions) * len(positions[0].token_ids) * _ENTRY_BYTES
