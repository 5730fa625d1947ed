"""The JSON bodies of both endpoints as OpenAI defines them, and the fields we add to them.

Types are strict, unknown fields are refused, and null is the same as absent. What a value may be is the business of
`router.validation`, which every request meets later; here stands only what JSON can say and protobuf cannot.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from fissile.errors import FieldViolation

MAX_DEPTH = 100
"""Of free-form JSON, such as a schema."""

MAX_SHOWN = 64
"""Characters of a client's own words in an error."""

UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


def _shallow(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"must not be nested deeper than {MAX_DEPTH} levels")
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _shallow(child, depth + 1)
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_shallow)]


def _as_text(value: Any) -> Any:
    return json.dumps(_shallow(value)) if isinstance(value, dict) else value


JsonText = Annotated[str, BeforeValidator(_as_text)]
"""An object, or its text."""


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


FIRST_FAULT = Field(fail_fast=True)
"""Of a list: what is wrong with the first entry at fault is said, and the others are not looked at."""
Strings = Annotated[list[str], FIRST_FAULT]
StringOrList = Annotated[Strings, BeforeValidator(_one_or_many)]
TokenIds = Annotated[list[UInt32], FIRST_FAULT]

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """A text, token ids, or several of one kind: always as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("must not be empty")
    if _are_token_ids(value):
        return [value]
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and _are_token_ids(item) for item in value):
        return value
    raise ValueError("must be a list of strings, of token ids (0 to 4294967295) or of lists of token ids")


def _are_token_ids(value: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item < 2**32 for item in value)


def _token_keys(value: Any) -> dict[int, float]:
    """JSON has no other keys than strings."""
    if not isinstance(value, dict):
        raise ValueError("must be an object from token id to bias")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**32):
            raise ValueError(f"{key!r} is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > 1e30:
            raise ValueError(f"the bias of {key} must be a number between −100 and 100")
    return {int(key): float(bias) for key, bias in value.items()}


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Not acted on: our messages have no padding."""


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None
    """Not acted on: an answer always follows the schema."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema and the field json_schema go together")
        return self


class StructuredOutputs(Body):
    """Ours: constraints that OpenAI's response_format has no words for."""

    json_: JsonText | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: Strings | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        if sum(v is not None for v in (self.json_, self.regex, self.grammar, self.choice)) != 1:
            raise ValueError("must have exactly one of json, regex, grammar, choice")
        return self


class GenerationBody(Body):
    """What both endpoints share."""

    model: str | None = None
    max_tokens: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: UInt32 | None = None
    stop: StringOrList | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_token_keys)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # Ours from here on.
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: UInt32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Strings | None = None
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None

    def conflicts(self) -> Iterator[FieldViolation]:
        """What each field alone does not show."""
        if self.stream_options is not None and not self.stream:
            yield FieldViolation("stream_options", "needs stream")
        is_constrained = self.response_format is not None and self.response_format.type != "text"
        if is_constrained and self.structured_outputs is not None:
            yield FieldViolation("structured_outputs", "excludes response_format")

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: UInt32 | None = None
    echo: bool | None = None
    best_of: UInt32 | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def conflicts(self) -> Iterator[FieldViolation]:
        yield from super().conflicts()
        if self.suffix:
            yield FieldViolation("suffix", "is not supported")
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            yield FieldViolation("best_of", f"is not supported beyond n, which is {n}")


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
