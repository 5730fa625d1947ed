"""What is new for a client, in messages below the size limit.

Text and tokens alone hardly get there; log probabilities do: of many completions, or of all that a slow client or one
that asked for the end only has not seen yet.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fissile.errors import InvalidArgumentError
from router.answering.completion import Delta
from router.answering.update import Update, entries_of

MAX_PART_BYTES = 2 * 1024 * 1024
"""By estimate. gRPC keeps one of them for a client that does not read, and clients in other languages take 4 MiB."""
_ENTRY_BYTES = 40
"""Of a log probability: token, value, rank, the text of the token, and what stands around them."""
_TOKEN_BYTES = 5
_CHARACTER_BYTES = 4


def parts(update: Update, *, cumulative: bool) -> Iterable[Update]:
    """`update` itself, if it is small enough; else several, of which the last has usage and timings. Raises
    InvalidArgumentError for a large one that is `cumulative`: each of those has to stand alone."""
    if sum(map(_num_bytes, update.deltas)) <= MAX_PART_BYTES:
        return (update,)
    if cumulative:
        raise InvalidArgumentError.of("options.output.cumulative", "what there is so far is too large for one message")
    return _cut(update)


def _cut(update: Update) -> Iterator[Update]:
    waiting: list[Delta] = []
    num_bytes = 0
    first = replace(update, usage=None, timings=None)
    for delta in update.deltas:
        for piece in _pieces(delta):
            size = _num_bytes(piece)
            if waiting and num_bytes + size > MAX_PART_BYTES:
                yield replace(first, deltas=waiting)
                first = Update()
                waiting, num_bytes = [], 0
            waiting.append(piece)
            num_bytes += size
    yield replace(first, deltas=waiting, usage=update.usage, timings=update.timings)


def _pieces(delta: Delta) -> Iterator[Delta]:
    """Text, tool calls and the end are in the last one."""
    if _num_bytes(delta) <= MAX_PART_BYTES or len(delta.logprobs) < 2:
        yield delta
        return
    step = max(1, MAX_PART_BYTES // (_ENTRY_BYTES * len(delta.logprobs[0].logprobs)))
    for start in range(0, len(delta.logprobs), step):
        end = start + step
        tokens, logprobs = delta.token_ids[start:end], delta.logprobs[start:end]
        if end < len(delta.logprobs):
            yield Delta(delta.index, "", "", [], tokens, logprobs, None, delta.prompt_index)
        else:
            yield replace(delta, token_ids=tokens, logprobs=logprobs)


def _num_bytes(delta: Delta) -> int:
    num_characters = len(delta.text) + len(delta.reasoning)
    for call in delta.tool_calls:
        num_characters += len(call.arguments)
    num_bytes = num_characters * _CHARACTER_BYTES + len(delta.token_ids) * _TOKEN_BYTES
    return num_bytes + entries_of(delta.logprobs) * _ENTRY_BYTES
