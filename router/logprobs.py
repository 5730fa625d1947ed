"""Log probabilities as workers send them, with the text of their tokens."""

from collections.abc import Callable, Iterable

from fissile.v1 import TokenLogprobs

TokenBytes = Callable[[Iterable[int]], list[bytes]]
"""Bytes of each token."""


def with_text(positions: Iterable[TokenLogprobs], token_bytes: TokenBytes) -> list[TokenLogprobs]:
    """Copies, so that what waits for a client keeps no message of a worker alive."""
    return [_with_text(position, token_bytes) for position in positions]


def _with_text(position: TokenLogprobs, token_bytes: TokenBytes) -> TokenLogprobs:
    result = TokenLogprobs()
    result.CopyFrom(position)
    texts = token_bytes(entry.token_id for entry in result.logprobs)
    for entry, text in zip(result.logprobs, texts, strict=True):
        entry.text = text
    return result
