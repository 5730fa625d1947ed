"""Every rule on a request's fields, in one place. All violations of a request are reported together.

Rules see the message by path (`options.sampling.top_p`). A field that is not set breaks no rule.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from common.errors import FieldViolation, InvalidArgumentError, UnimplementedError
from fissile.v1 import ChatRequest, ChatRole, DetokenizeRequest, GenerateRequest, TokenizeRequest

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_COMPLETIONS = 128
MAX_LOGPROBS = 64
MIN_BEAMS = 2
MAX_BEAMS = 16
MAX_KEY_BYTES = 256
MAX_REQUEST_ID_CHARACTERS = 128
MIN_HEARTBEAT_SECONDS = 0.01
_REQUEST_ID = re.compile(r"[ -~]*")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the rules compare with: the model's and the router's limits."""

    vocab_size: int
    max_model_len: int
    max_prompt_bytes: int


Check = Callable[[Any, Limits], str | None]
"""What is wrong with a value, or None."""


def between(low: float, high: float, *, above_low: bool = False) -> Check:
    """A finite number in [low, high], or (low, high] with `above_low`."""
    sign = "<" if above_low else "≤"

    def check(value: float, limits: Limits) -> str | None:
        too_low = value <= low if above_low else value < low
        if math.isnan(value) or too_low or value > high:
            return f"must be {low:g} {sign} value ≤ {high:g}, is {value:g}"
        return None

    return check


def at_least(low: int) -> Check:
    return lambda value, limits: f"must be at least {low}, is {value}" if value < low else None


def at_most_bytes(high: int) -> Check:
    def check(value: str | bytes, limits: Limits) -> str | None:
        size = len(value.encode() if isinstance(value, str) else value)
        return f"must have at most {high} bytes, has {size}" if size > high else None

    return check


def finite(value: float, limits: Limits) -> str | None:
    return None if math.isfinite(value) else f"must be finite, is {value:g}"


def request_id(value: str, limits: Limits) -> str | None:
    if len(value) > MAX_REQUEST_ID_CHARACTERS:
        return f"must have at most {MAX_REQUEST_ID_CHARACTERS} characters, has {len(value)}"
    return None if _REQUEST_ID.fullmatch(value) else "must be printable ASCII"


def stop_strings(values: list[str], limits: Limits) -> str | None:
    if len(values) > MAX_STOPS:
        return f"must have at most {MAX_STOPS} entries, has {len(values)}"
    for i, value in enumerate(values):
        if not 1 <= len(value) <= MAX_STOP_CHARACTERS:
            return f"entry {i} must have 1 to {MAX_STOP_CHARACTERS} characters, has {len(value)}"
    return None


def token_ids(values: Iterable[int], limits: Limits) -> str | None:
    if max(values, default=0) < limits.vocab_size:
        return None
    i, bad = next((i, value) for i, value in enumerate(values) if value >= limits.vocab_size)
    return f"entry {i} must be below the vocabulary size {limits.vocab_size}, is {bad}"


def some_token_ids(values: list[int], limits: Limits) -> str | None:
    return token_ids(values, limits) if values else "must not be empty"


def token_sequences(values: Iterable[Any], limits: Limits) -> str | None:
    for i, sequence in enumerate(values):
        fault = some_token_ids(sequence.token_ids, limits)
        if fault:
            return f"sequence {i}: {fault}"
    return None


def prompt_text(value: str, limits: Limits) -> str | None:
    if not value:
        return "must not be empty"
    return at_most_bytes(limits.max_prompt_bytes)(value, limits)


def heartbeat(value: Any, limits: Limits) -> str | None:
    seconds = value.ToNanoseconds() / 1e9
    return None if seconds >= MIN_HEARTBEAT_SECONDS else f"must be at least {MIN_HEARTBEAT_SECONDS} s, is {seconds:g} s"


def messages(values: list[Any], limits: Limits) -> str | None:
    if not values:
        return "must not be empty"
    for i, message in enumerate(values):
        if message.role == ChatRole.CHAT_ROLE_UNSPECIFIED or message.role not in ChatRole.values():
            return f"message {i} needs a role, has {message.role}"
    size = sum(len(message.content.encode()) for message in values)
    if size > limits.max_prompt_bytes:
        return f"must have at most {limits.max_prompt_bytes} bytes, has {size}"
    return None


OPTION_RULES: dict[str, Check] = {
    "options.sampling.temperature": between(0, 100),
    "options.sampling.top_k": at_least(-1),
    "options.sampling.top_p": between(0, 1, above_low=True),
    "options.sampling.min_p": between(0, 1),
    "options.sampling.num_logprobs": between(0, MAX_LOGPROBS),
    "options.sampling.num_prompt_logprobs": between(0, MAX_LOGPROBS),
    "options.sampling.beam_search.width": between(MIN_BEAMS, MAX_BEAMS),
    "options.sampling.beam_search.length_penalty": finite,
    "options.max_tokens": at_least(1),
    "options.stop": stop_strings,
    "options.stop_token_ids": token_ids,
    "options.stop_token_sequences": token_sequences,
    "options.n": between(1, MAX_COMPLETIONS),
    "options.cache_salt": at_most_bytes(MAX_KEY_BYTES),
    "options.output.heartbeat": heartbeat,
}
GENERATE_RULES: dict[str, Check] = {
    "request_id": request_id,
    "text": prompt_text,
    "tokens.token_ids": some_token_ids,
    **OPTION_RULES,
}
CHAT_RULES: dict[str, Check] = {
    "request_id": request_id,
    "messages": messages,
    "chat_template": at_most_bytes(1024 * 1024),
    **OPTION_RULES,
}
TOKENIZE_RULES: dict[str, Check] = {"text": lambda value, limits: at_most_bytes(limits.max_prompt_bytes)(value, limits)}
DETOKENIZE_RULES: dict[str, Check] = {"token_ids": token_ids}

UNSUPPORTED = (
    "options.sampling.presence_penalty",
    "options.sampling.frequency_penalty",
    "options.sampling.repetition_penalty",
    "options.sampling.logit_bias",
    "options.sampling.allowed_token_ids",
    "options.sampling.banned_token_ids",
    "options.sampling.bad_token_sequences",
    "options.sampling.structured_output",
    "options.bad_words",
    "options.routing_key",
    "prompts",
)
"""Fields of the contract that nothing acts on yet: refused, never ignored."""


def validate(request: Message, rules: dict[str, Check], limits: Limits) -> None:
    """Raises InvalidArgumentError with every violation."""
    violations = [*_broken(request, rules, limits), *_broken_together(request)]
    if violations:
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        raise InvalidArgumentError(text, violations=violations)


def refuse_unsupported(request: Message) -> None:
    """Raises UnimplementedError naming the fields that are set and not served yet."""
    fields = [path for path in UNSUPPORTED if value_at(request, path) is not None]
    if fields:
        raise UnimplementedError(
            f"not implemented yet: {', '.join(fields)}",
            violations=[FieldViolation(f, "not implemented") for f in fields],
        )


def check_length(field: str, num_tokens: int, limits: Limits) -> None:
    """Raises InvalidArgumentError when a prompt leaves no room for a token."""
    if num_tokens == 0:
        raise InvalidArgumentError.of(field, "has no tokens")
    if num_tokens >= limits.max_model_len:
        raise InvalidArgumentError.of(
            field,
            f"the prompt has {num_tokens} tokens; the model's context of {limits.max_model_len} leaves at most "
            f"{limits.max_model_len - 1}",
        )


def value_at(request: Message, path: str) -> Any:
    """The field's value, or None when it is not set (repeated: empty; without presence: the default)."""
    *parents, name = path.split(".")
    holder = request
    for parent in parents:
        if not _has(holder, parent):
            return None
        holder = getattr(holder, parent)
    return getattr(holder, name) if _has(holder, name) else None


def _has(holder: Message, name: str) -> bool:
    field = holder.DESCRIPTOR.fields_by_name.get(name)
    if field is None:
        return False
    if field.has_presence:
        return holder.HasField(name)
    return bool(getattr(holder, name))


_REQUIRED = {"tokens.token_ids", "messages", "options.sampling.beam_search.width"}
"""Fields without presence that must not be empty where their parent is set. `text` has presence."""


def _broken(request: Message, rules: dict[str, Check], limits: Limits) -> Iterator[FieldViolation]:
    for path, check in rules.items():
        value = value_at(request, path)
        if value is None and path in _REQUIRED:
            value = _empty_value(request, path)
        fault = check(value, limits) if value is not None else None
        if fault:
            yield FieldViolation(path, fault)


def _empty_value(request: Message, path: str) -> Any:
    parent, _, name = path.rpartition(".")
    holder = value_at(request, parent) if parent else request
    return getattr(holder, name) if holder is not None else None


def _broken_together(request: Message) -> Iterator[FieldViolation]:
    """Rules on several fields at once."""
    if isinstance(request, GenerateRequest) and request.WhichOneof("prompt") is None and not request.prompts:
        yield FieldViolation("text", "a prompt is needed: text or tokens")
    if not isinstance(request, (GenerateRequest, ChatRequest)):
        return
    options = request.options
    n = options.n if options.HasField("n") else 1
    if options.sampling.HasField("beam_search"):
        width = options.sampling.beam_search.width
        if n > width >= MIN_BEAMS:
            yield FieldViolation("options.n", f"must not exceed the beam width {width}, is {n}")
        if options.stop:
            yield FieldViolation("options.stop", "beam search has no stop strings; use stop_token_ids")
        for name in ("num_logprobs", "num_prompt_logprobs"):
            if options.sampling.HasField(name):
                yield FieldViolation(f"options.sampling.{name}", "beam search has none; its hypotheses have scores")
    if isinstance(request, ChatRequest) and options.sampling.HasField("num_prompt_logprobs"):
        yield FieldViolation("options.sampling.num_prompt_logprobs", "Chat has none; use Generate")
    if options.HasField("min_tokens") and options.HasField("max_tokens") and options.min_tokens > options.max_tokens:
        yield FieldViolation(
            "options.min_tokens", f"must not exceed max_tokens {options.max_tokens}, is {options.min_tokens}"
        )


RULES: dict[type[Message], dict[str, Check]] = {
    GenerateRequest: GENERATE_RULES,
    ChatRequest: CHAT_RULES,
    TokenizeRequest: TOKENIZE_RULES,
    DetokenizeRequest: DETOKENIZE_RULES,
}
