"""The JSON body of a chat."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from fissile.errors import FieldViolation
from router.http.bodies import FIRST_FAULT, Body, GenerationBody, JsonObject, UInt32

MAX_SHOWN = 64
"""Characters of a client's own words in an error."""

_KINDS = {
    "image_url": "images", "image": "images", "input_image": "images",
    "input_audio": "audio", "audio_url": "audio", "audio": "audio",
    "video_url": "video", "video": "video", "input_video": "video",
    "file": "files", "input_file": "files",
}  # fmt: skip
"""What parts of a type hold."""


def _part_type(value: Any) -> Any:
    if value in ("text", "refusal") or not isinstance(value, str):
        return value
    if value in _KINDS:
        raise ValueError(f"this model takes no {_KINDS[value]}, only text")
    raise ValueError(f"{value[:MAX_SHOWN]!r} is no type of content here; it is text")


def _without_its_content(value: Any) -> Any:
    """Of a part that is refused for its type, which is all there is to say about it."""
    is_text = not isinstance(value, dict) or value.get("type") in (None, "text", "refusal")
    return value if is_text else {"type": value["type"]}


class TextPart(Body):
    type: Annotated[Literal["text", "refusal"], BeforeValidator(_part_type)]
    text: str | None = None
    refusal: str | None = None

    @property
    def content(self) -> str:
        return self.text or self.refusal or ""


def _parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return [_without_its_content(part) for part in value] if isinstance(value, list) else value


def _none(what: str) -> BeforeValidator:
    """Of what OpenAI's answers can have and ours have not: null is all it may be."""

    def check(value: Any) -> None:
        if value is not None:
            raise ValueError(what)

    return BeforeValidator(check)


class FunctionCall(Body):
    name: str
    arguments: str
    # What OpenAI's client adds to an answer.
    parsed_arguments: Any = None


class ToolCall(Body):
    id: str
    type: Literal["function"] | None = None
    function: FunctionCall
    # Of a call that was collected from a stream.
    index: int | None = None


class Message(Body):
    """One message of a conversation. Fields that an answer of ours has may come back with it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], FIRST_FAULT, BeforeValidator(_parts)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_FAULT] | None = None
    reasoning_content: str | None = None
    # What OpenAI's client sends back of an answer, and no template knows.
    refusal: str | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    audio: Annotated[None, _none("this model takes no audio, only text")] = None
    function_call: Annotated[None, _none("is not supported; use tool_calls")] = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    """Not acted on: arguments follow their schema where `tool_choice` asks anything of calls, and nowhere else."""


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FIRST_FAULT]


class ToolChoice(Body):
    """Which tools may or must be called."""

    type: Literal["function", "allowed_tools", "none", "auto", "required"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> "ToolChoice":
        for name, value in (("function", self.function), ("allowed_tools", self.allowed_tools)):
            if (self.type == name) != (value is not None):
                raise ValueError(f"type {name} and the field {name} go together")
        return self


def _tool_choice(value: Any) -> Any:
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise ValueError("must be none, auto, required or an object that names tools")
    return {"type": value} if isinstance(value, str) else value


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FIRST_FAULT]
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: Annotated[list[Tool], FIRST_FAULT] | None = None
    tool_choice: Annotated[ToolChoice, BeforeValidator(_tool_choice)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: Annotated[list[Literal["text"]], FIRST_FAULT] | None = None
    # Ours from here on.
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    continue_final_message: bool | None = None

    def conflicts(self) -> Iterator[FieldViolation]:
        yield from super().conflicts()
        if self.top_logprobs is not None and not self.logprobs:
            yield FieldViolation("top_logprobs", "needs logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            yield FieldViolation("max_tokens", "differs from max_completion_tokens, which takes its place")
