"""POST /v1/chat/completions: ChatResponse as JSON."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fissile.v1 import ChatDelta, ChatResponse, ToolCallDelta
from router.http.answers import Envelope, Json, finish_reason, usage_json
from router.http.logprobs import chat_logprobs

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"


@dataclass(slots=True)
class ChatWriter:
    envelope: Envelope
    num_logprobs: int | None = None
    _begun: set[int] = field(default_factory=set)
    """Choices that have said whose message it is."""
    _called: set[int] = field(default_factory=set)
    """Choices that call a tool."""

    def chunks(self, message: ChatResponse) -> Iterator[Json]:
        for delta in message.completions:
            choice = {"index": delta.index, "delta": self._delta(delta), **self._end(delta)}
            yield self.envelope.chunk(CHUNK_KIND, choice)
        if message.HasField("usage") and self.envelope.includes_usage:
            yield self.envelope.around(CHUNK_KIND, [], usage_json(message.usage))

    def whole(self, message: ChatResponse) -> Json:
        choices = [
            {"index": delta.index, "message": _message(delta), **self._end(delta)}
            for delta in sorted(message.completions, key=lambda delta: delta.index)
        ]
        return self.envelope.around(KIND, choices, usage_json(message.usage))

    def _delta(self, delta: ChatDelta) -> Json:
        result: Json = {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            result = {"role": "assistant", "content": ""}
        if delta.content:
            result["content"] = delta.content
        if delta.reasoning:
            result["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            result["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        return result

    def _end(self, delta: ChatDelta) -> Json:
        if delta.tool_calls:
            self._called.add(delta.index)
        has_called = delta.index in self._called
        return {
            "logprobs": None if self.num_logprobs is None else chat_logprobs(delta.logprobs, self.num_logprobs),
            "finish_reason": finish_reason(delta.finish, has_called=has_called) if delta.HasField("finish") else None,
        }


def _message(delta: ChatDelta) -> Json:
    """Content is null where a tool is called and nothing is said."""
    content = None if delta.tool_calls and not delta.content else delta.content
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        message["tool_calls"] = _calls(delta.tool_calls)
    return message


def _call_delta(call: ToolCallDelta) -> Json:
    """Id, type and name stand in the first part only."""
    function: Json = {"arguments": call.arguments}
    if not call.id:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


def _calls(parts: Iterable[ToolCallDelta]) -> list[Json]:
    """Whole calls from their parts, in order."""
    calls: dict[int, Json] = {}
    for part in parts:
        if part.index not in calls:
            calls[part.index] = {
                "id": part.id,
                "type": "function",
                "function": {"name": part.name, "arguments": ""},
            }
        calls[part.index]["function"]["arguments"] += part.arguments
    return [calls[index] for index in sorted(calls)]
