"""What the answers of both endpoints have in common."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fissile.errors import DeadlineExceededError, InternalError
from fissile.v1 import ChatResponse, Finish, FinishReason, GenerateResponse, Usage

M = TypeVar("M", contravariant=True)

Json = dict[str, Any]

_STOP = "stop"
_FINISH_REASONS = {
    FinishReason.FINISH_REASON_EOS: _STOP,
    FinishReason.FINISH_REASON_STOP_TOKEN: _STOP,
    FinishReason.FINISH_REASON_STOP_SEQUENCE: _STOP,
    FinishReason.FINISH_REASON_STOP_STRING: _STOP,
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_MODEL_LENGTH: "length",
}


class Writer(Protocol[M]):
    """Writes the messages of one request as JSON."""

    def chunks(self, message: M) -> Iterator[Json]:
        """Of a stream: one for each choice with news, then the usage where it was asked for."""

    def whole(self, message: M) -> Json:
        """The one answer, from a message with everything."""


@dataclass(slots=True)
class Envelope:
    """The fields around every answer and chunk of a request."""

    id: str
    model: str
    includes_usage: bool = False
    """In a stream."""
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, kind: str, choices: list[Json], usage: Json | None = None) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }

    def chunk(self, kind: str, choice: Json) -> Json:
        """Where usage was asked for, every chunk but the last has none, in so many words."""
        result = self.around(kind, [choice])
        if not self.includes_usage:
            del result["usage"]
        return result


def join(whole: GenerateResponse | ChatResponse, part: GenerateResponse | ChatResponse) -> None:
    """Add the next message of an answer that is too long for one. A completion is cut in one place at most, before its
    end."""
    last = whole.completions[-1] if whole.completions else None
    if last is not None and part.completions and not last.HasField("finish"):
        last.MergeFrom(part.completions[0])  # type: ignore[arg-type]
        del part.completions[0]
    whole.MergeFrom(part)  # type: ignore[arg-type]


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


def finish_reason(finish: Finish, *, has_called: bool = False) -> str:
    """`has_called`: the answer calls a tool. Raises the error that an end without a word of OpenAI's stands for."""
    reason = _FINISH_REASONS.get(finish.reason)
    if reason is not None:
        return "tool_calls" if has_called and reason == _STOP else reason
    if finish.reason == FinishReason.FINISH_REASON_DEADLINE:
        raise DeadlineExceededError(finish.detail or "the deadline passed")
    raise InternalError(f"ended by {FinishReason.Name(finish.reason)}: {finish.detail}")
