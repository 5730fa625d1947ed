"""Log probabilities in the two forms that OpenAI's endpoints have."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from fissile.v1 import TokenLogprob, TokenLogprobs

LEAST = -9999.0
"""What OpenAI writes for a probability of zero: JSON has no −∞."""


class CompletionLogprobs:
    """Of one choice of /v1/completions. Keeps count of the text, for the offsets."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def feed(self, tokens: Iterable[TokenLogprobs], num_top: int) -> dict[str, Any]:
        """What is new. Offsets count characters of the joined tokens. A token of rank 0, the first of a prompt, has no
        log probability."""
        result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in tokens:
            chosen = entry.logprobs[0]
            result["tokens"].append(_token_text(chosen.text))
            result["token_logprobs"].append(_number(chosen) if chosen.rank else None)
            result["top_logprobs"].append(_top_by_text(entry, num_top) if chosen.rank else None)
            result["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(chosen.text))
        return result


def chat_logprobs(tokens: Iterable[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """Of new tokens of an answer."""
    content = [
        {**_chat_token(entry.logprobs[0]), "top_logprobs": [_chat_token(t) for t in _top(entry.logprobs, num_top)]}
        for entry in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.text.decode(errors="replace"),
        "logprob": _number(token),
        "bytes": list(token.text),
    }


def _top(tokens: Sequence[TokenLogprob], num_top: int) -> list[TokenLogprob]:
    """The most likely ones, each once: the chosen token may be among them."""
    unique = {token.token_id: token for token in tokens}
    return sorted(unique.values(), key=lambda token: -token.logprob)[:num_top]


def _top_by_text(entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """With the chosen token, even where it is none of the most likely."""
    return {_token_text(token.text): _number(token) for token in (*_top(entry.logprobs, num_top), entry.logprobs[0])}


def _token_text(text: bytes) -> str:
    """Part of a character is written as OpenAI does it, so that different tokens stay different."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _number(token: TokenLogprob) -> float:
    return max(token.logprob, LEAST)
