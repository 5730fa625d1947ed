"""Log probabilities as workers send them, with the text of their tokens."""

from collections.abc import Callable, Iterable

from fissile.v1 import PositionLogprobs, TokenLogprob, TokenLogprobs

TokenBytes = Callable[[Iterable[int]], list[bytes]]
"""Bytes of each token."""


def with_text(positions: Iterable[PositionLogprobs], token_bytes: TokenBytes) -> list[TokenLogprobs]:
    """In messages of their own, so that what waits for a client keeps none of a worker alive."""
    return [_with_text(position, token_bytes) for position in positions]


def _with_text(position: PositionLogprobs, token_bytes: TokenBytes) -> TokenLogprobs:
    texts = token_bytes(position.token_ids)
    columns = zip(position.token_ids, position.logprobs, position.ranks, texts, strict=True)
    return TokenLogprobs(
        logprobs=[TokenLogprob(token_id=id, logprob=value, rank=rank, text=text) for id, value, rank, text in columns]
    )
