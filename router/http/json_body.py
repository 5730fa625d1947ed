"""From the bytes of a request to a typed body, with an error that names every field at fault."""

import json
from collections.abc import Iterator
from itertools import chain, compress
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fissile.errors import MAX_VIOLATIONS, FieldViolation, InvalidArgumentError
from router.asking.validation import refuse
from router.http.bodies import GenerationBody

B = TypeVar("B", bound=GenerationBody)

MAX_DEPTH = 128
"""Of a body: JSON in it may have 100 levels."""
MAX_NODES = 100_000
TOO_MANY = f"the body must have at most {MAX_NODES} objects, arrays and names in these"
MAX_QUOTES = 1_000_000
MAX_VALUES = 250_000
"""Of a body, numbers among them. `json` and pydantic let nothing else run: so many take a tenth of a second."""
BEGINNING_BYTES = 512 * 1024
_CONTAINERS = frozenset({dict, list})
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention"})
"""Fields of OpenAI's that say nothing about the answer: accepted, not acted on. Any other unknown field is refused."""


def parse_body(raw: bytes, cls: type[B]) -> B:
    """Raises InvalidArgumentError: no JSON object, text that is no Unicode, unknown fields, wrong types, conflicts."""
    values = _json_object(raw)
    try:
        body = cls.model_validate({name: value for name, value in values.items() if name not in IGNORED})
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)[: MAX_VIOLATIONS + 1]
        refuse(_violation(values, fault) for fault in faults)
    refuse(body.conflicts())
    return body


def _json_object(raw: bytes) -> dict[str, Any]:
    _check_number(raw)
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"the body is no valid UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the body is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError("the body must be a JSON object")
    _check_shape(value)
    # Only an escape can bring half a surrogate pair into decoded text.
    if b"\\u" in raw:
        refuse(FieldViolation(path, "has half a surrogate pair, which is no text") for path in _no_text(value, ""))
    return value


def _check_number(raw: bytes) -> None:
    """Before anything is made of it: a byte of a body can become 100 of memory, and hold the interpreter meanwhile. Too
    many in the beginning are too many in all, and to count in 12 MiB takes the interpreter 60 ms."""
    if len(raw) > BEGINNING_BYTES:
        _check_number(raw[:BEGINNING_BYTES])
    is_small = raw.count(b'"') <= MAX_QUOTES and raw.count(b",") <= MAX_VALUES
    if is_small and raw.count(b"{") + raw.count(b"[") <= MAX_NODES:
        return
    # Many of these may stand inside of a text.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > MAX_QUOTES:
        raise InvalidArgumentError(f"the body must have at most {MAX_QUOTES // 2} strings")
    outside = plain.split(b'"')[::2]
    if sum(part.count(b"{") + part.count(b"[") for part in outside) > MAX_NODES:
        raise InvalidArgumentError(TOO_MANY)
    if sum(part.count(b",") for part in outside) >= MAX_VALUES:
        raise InvalidArgumentError(f"the body must have at most {MAX_VALUES} values; gRPC takes longer lists of tokens")


def _check_shape(body: dict[str, Any]) -> None:
    """Depth and number, before anything is done that takes longer for each than to count it. Of 250,000 values this
    must not take as long as parsing them, so what is done to each is done in C."""
    level: list[Any] = [body]
    num_depth, num_nodes = 0, 0
    while level:
        num_depth += 1
        objects = [node for node in level if type(node) is dict]
        num_nodes += len(level) + sum(map(len, objects))
        if num_depth > MAX_DEPTH:
            raise InvalidArgumentError(f"the body must not be nested deeper than {MAX_DEPTH} levels")
        if num_nodes > MAX_NODES:
            raise InvalidArgumentError(TOO_MANY)
        lists = [node for node in level if type(node) is list]
        children = [*chain.from_iterable(map(dict.values, objects)), *chain.from_iterable(lists)]
        level = list(compress(children, map(_CONTAINERS.__contains__, map(type, children))))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _no_text(value: Any, path: str) -> Iterator[str]:
    """Paths of the strings that have no UTF-8."""
    if isinstance(value, str):
        if not _is_text(value):
            yield path
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _no_text(item, f"{path}[{i}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            if _is_text(name):
                yield from _no_text(item, _join(path, name))
            else:
                yield path or "a field's name"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _join(path: str, part: str | int) -> str:
    if isinstance(part, int):
        return f"{path}[{part}]"
    return f"{path}.{part}" if path else part


def _violation(values: dict[str, Any], fault: ErrorDetails) -> FieldViolation:
    text = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        text = "is no field of this request"
    return FieldViolation(_path(values, fault), text[:1].lower() + text[1:])


def _path(values: Any, fault: ErrorDetails) -> str:
    """Where in the body: pydantic's location without the names of union members, which no client has written."""
    path = ""
    for position, part in enumerate(fault["loc"]):
        is_missing = fault["type"] == "missing" and position == len(fault["loc"]) - 1
        if isinstance(values, dict) and (part in values or is_missing):
            values = values.get(part)
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part]
        else:
            continue
        path = _join(path, part)
    return path
