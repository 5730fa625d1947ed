"""What goes to a client at a time, and what it takes while it waits for that."""

from collections.abc import Sequence
from dataclasses import dataclass

from fissile.v1 import RequestOutput, RequestTimings, TokenLogprobs, Usage
from router.answering.completion import Delta
from router.answering.prompt_logprobs import prompt_logprob_bytes

# Of memory, as long as the client has not read it: a token with its text, and an entry of its log probabilities.
TOKEN_BYTES = 64
ENTRY_BYTES = 16

MAX_ENTRIES = 4096
"""Of log probabilities in one update. Writing their text takes some ten milliseconds of the event loop."""
ENTRIES_PER_MESSAGE = 128
"""That cost what a message costs."""


@dataclass(slots=True)
class Update:
    """One message to the client."""

    deltas: Sequence[Delta] = ()
    num_entries: int = 0
    """Of log probabilities."""
    usage: Usage | None = None
    """Set in the last one."""
    timings: RequestTimings | None = None
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    def count_entries(self) -> int:
        """Sets `num_entries`, which is none until then, and returns it."""
        self.num_entries = entries_of(self.prompt_logprobs)
        for delta in self.deltas:
            self.num_entries += entries_of(delta.logprobs)
        return self.num_entries


def entries_of(positions: Sequence[TokenLogprobs]) -> int:
    """All positions have as many."""
    return len(positions) * len(positions[0].logprobs) if positions else 0


def unread_bytes(output: RequestOutput) -> int:
    """That it takes until the client has read it."""
    num_bytes = len(output.token_ids) * TOKEN_BYTES
    if output.logprobs:
        num_bytes += len(output.logprobs) * len(output.logprobs[0].token_ids) * ENTRY_BYTES
    if output.prompt_logprobs:
        num_bytes += prompt_logprob_bytes(output.prompt_logprobs)
    return num_bytes
