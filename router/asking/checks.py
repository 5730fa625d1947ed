"""What can be wrong with one value. A check says it in words, with the value and the limit, or returns None."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from common.bounds import Range
from fissile.v1 import ChatMessage, ChatRole, StructuredOutput, ToolChoiceMode


@dataclass(frozen=True, slots=True)
class Limits:
    """What the checks compare with: the model's and the router's limits."""

    vocab_size: int
    max_model_len: int
    max_prompt_bytes: int
    dp_size: int = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """`at` is where, below the field: `[3]`, or empty for the field itself."""

    text: str
    at: str = ""


Check = Callable[[Any, Limits], Fault | str | None]


def all_of(*checks: Check) -> Check:
    """The first fault of several checks."""

    def check(value: Any, limits: Limits) -> Fault | str | None:
        for one in checks:
            if fault := one(value, limits):
                return fault
        return None

    return check


def within(bounds: Range) -> Check:
    """A number."""
    low, high = bounds.low, bounds.high
    wanted = f"{low:g} {'<' if bounds.above_low else '≤'} value ≤ {high:g}" if high < math.inf else f"at least {low:g}"
    return lambda value, limits: None if value in bounds else f"must be {wanted}, is {value:g}"


def finite(value: float, limits: Limits) -> str | None:
    return None if math.isfinite(value) else f"must be finite, is {value:g}"


def is_true(value: bool, limits: Limits) -> str | None:
    return None if value else "must be true when set, is false"


def entries(low: int, high: int) -> Check:
    """Of a list: how many."""

    def check(values: Sequence[Any], limits: Limits) -> str | None:
        if len(values) < low:
            return "must not be empty" if low == 1 else f"must have at least {low} entries, has {len(values)}"
        return too_many(values, high)

    return check


def too_many(values: Sequence[Any], most: int) -> str | None:
    """What is wrong with a list of more entries than that."""
    return f"must have at most {most} entries, has {len(values)}" if len(values) > most else None


def at_most_vocabulary(values: Sequence[int], limits: Limits) -> Fault | str | None:
    return entries(0, limits.vocab_size)(values, limits)


def distinct(key: Callable[[Any], Any], name: str) -> Check:
    """Of a list of messages: no two have the same `key`, which is their field `name`."""

    def check(values: Iterable[Any], limits: Limits) -> Fault | None:
        seen: dict[Any, int] = {}
        for i, value in enumerate(values):
            first = seen.setdefault(key(value), i)
            if first != i:
                return Fault(f"must differ from entry {first}, is {key(value)!r} too", f"[{i}].{name}")
        return None

    return check


def characters(low: int, high: int) -> Check:
    wanted = f"{low} to {high}" if low else f"at most {high}"

    def check(value: str, limits: Limits) -> str | None:
        return None if low <= len(value) <= high else f"must have {wanted} characters, has {len(value)}"

    return check


def at_most_bytes(high: int) -> Check:
    def check(value: str | bytes, limits: Limits) -> str | None:
        size = len(value.encode() if isinstance(value, str) else value)
        return f"must have at most {high} bytes, has {size}" if size > high else None

    return check


def together_at_most_bytes(high: int) -> Check:
    """Of a list of texts."""

    def check(values: Iterable[str], limits: Limits) -> str | None:
        size = sum(len(value.encode()) for value in values)
        return f"must have at most {high} bytes together, has {size}" if size > high else None

    return check


def not_empty(value: Sequence[Any], limits: Limits) -> str | None:
    return None if value else "must not be empty"


def matches(pattern: str, words: str) -> Check:
    compiled = re.compile(pattern)
    return lambda value, limits: None if compiled.fullmatch(value) else f"must be {words}, is {value!r}"


def token_id(value: int, limits: Limits) -> str | None:
    return None if value < limits.vocab_size else _beyond_vocabulary(value, limits)


def token_ids(values: Iterable[int], limits: Limits) -> Fault | None:
    if max(values, default=0) < limits.vocab_size:
        return None
    i, bad = next((i, value) for i, value in enumerate(values) if value >= limits.vocab_size)
    return Fault(_beyond_vocabulary(bad, limits), f"[{i}]")


def _beyond_vocabulary(value: int, limits: Limits) -> str:
    return f"must be below the vocabulary size {limits.vocab_size}, is {value}"


def prompt_bytes(value: str, limits: Limits) -> Fault | str | None:
    return at_most_bytes(limits.max_prompt_bytes)(value, limits)


def encoded_bytes(values: Iterable[Any], limits: Limits) -> str | None:
    """Of a list of messages: as many bytes as they have on the wire."""
    size = sum(value.ByteSize() for value in values)
    limit = limits.max_prompt_bytes
    return f"must have at most {limit} bytes encoded, has {size}" if size > limit else None


def at_most_encoded(high: int) -> Check:
    """Of a message: bytes on the wire."""

    def check(value: Message, limits: Limits) -> str | None:
        size = value.ByteSize()
        return f"must have at most {high} bytes encoded, has {size}" if size > high else None

    return check


def shorter_than_context(values: Sequence[int], limits: Limits) -> str | None:
    """Of a prompt as tokens: it must leave room for one more."""
    return too_long(len(values), limits) if len(values) >= limits.max_model_len else None


def too_long(num_tokens: int, limits: Limits) -> str:
    return (
        f"the prompt has {num_tokens} tokens; the model's context of {limits.max_model_len} leaves at most "
        f"{limits.max_model_len - 1}"
    )


def at_most_prompt_bytes(values: Sequence[int], limits: Limits) -> Fault | str | None:
    """Of tokens: as many as a text may have bytes."""
    return entries(0, limits.max_prompt_bytes)(values, limits)


def calls_together(high: int) -> Check:
    """Of messages: how many tool calls all of them have."""

    def check(messages: Iterable[ChatMessage], limits: Limits) -> str | None:
        num = sum(len(message.tool_calls) for message in messages)
        return f"must have at most {high} tool calls together, has {num}" if num > high else None

    return check


def role(value: int, limits: Limits) -> str | None:
    if value in ChatRole.values():
        return None if value else "is CHAT_ROLE_UNSPECIFIED; a message needs a role, such as CHAT_ROLE_USER"
    return f"must be a known role, is {value}"


def tool_choice_mode(value: int, limits: Limits) -> str | None:
    return None if value in ToolChoiceMode.values() else f"must be a known mode, is {value}"


def dp_rank(value: int, limits: Limits) -> str | None:
    size = max(1, limits.dp_size)
    return None if value < size else f"must be below {size}, is {value}"


def duration_of_at_least(seconds: float) -> Check:
    def check(value: Duration, limits: Limits) -> str | None:
        actual = value.ToNanoseconds() / 1e9
        return None if actual >= seconds else f"must be at least {seconds} s, is {actual:g} s"

    return check


def constraint(value: StructuredOutput, limits: Limits) -> str | None:
    if value.WhichOneof("constraint") is None:
        return "needs one of json_schema, json_object, regex, grammar, choice"
    return None


def is_routers(value: Message, limits: Limits) -> str | None:
    """Of a field that the router alone sets."""
    return "is set by the router; clients cannot"
