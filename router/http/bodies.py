"""The JSON bodies as OpenAI defines them, and the fields we add: what both endpoints share, and that of completions.

Types are strict, unknown fields are refused, and null is the same as absent. What a value may be is the business of
`router.asking.validation`, which every request meets later; here stands only what JSON can say and protobuf cannot.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from fissile.errors import FieldViolation

MAX_DEPTH = 100
"""Of free-form JSON, such as a schema."""

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
    prompt_cache_key: str | None = None
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
