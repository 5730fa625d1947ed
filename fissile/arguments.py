"""From arguments of Python to fields of messages: what a field cannot hold is refused by the argument's own name."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fissile.errors import InvalidArgumentError

M = TypeVar("M", bound=Message)

MAX_SECONDS = 1e9
"""More than gRPC's own limit would be a deadline in the past."""
_REFUSALS = (TypeError, ValueError, AttributeError, OverflowError)
_SHOWN_CHARACTERS = 60
_KINDS = {
    FieldDescriptor.TYPE_STRING: "a text of Unicode characters",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_UINT32: "an integer from 0 to 4294967295",
    FieldDescriptor.TYPE_UINT64: "an integer from 0 to 18446744073709551615",
    FieldDescriptor.TYPE_INT32: "an integer from -2147483648 to 2147483647",
    FieldDescriptor.TYPE_INT64: "an integer from -9223372036854775808 to 9223372036854775807",
}


def wrong(name: str, value: object, wanted: str) -> InvalidArgumentError:
    """The error for an argument that is not what it must be."""
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}…"
    return InvalidArgumentError.of(name, f"{shown} is not {wanted}")


def fill(kind: type[M], names: Mapping[str, str] = MappingProxyType({}), within: str = "", /, **values: Any) -> M:
    """A message with these fields. `names`: of arguments that are not called as their field is; `within`: the path in
    front of those that are. Raises InvalidArgumentError."""
    try:
        return kind(**values)
    except _REFUSALS:
        for field, value in values.items():
            _check(kind, field, value, names.get(field, f"{within}.{field}".removeprefix(".")))
        raise


def _check(kind: type[Message], field: str, value: Any, name: str) -> None:
    if field not in kind.DESCRIPTOR.fields_by_name:
        raise InvalidArgumentError.of(name, f"there is no such thing; known are {', '.join(_fields(kind))}")
    wanted = _KINDS.get(kind.DESCRIPTOR.fields_by_name[field].type, "a message")
    try:
        kind(**{field: value})
        return
    except _REFUSALS:
        is_list = not isinstance(getattr(kind(), field), str | bytes | int | float)
    if not is_list:
        raise wrong(name, value, wanted) from None
    for index, entry in enumerate(entries(name, value)):
        try:
            kind(**{field: [entry]})
        except _REFUSALS:
            raise wrong(f"{name}[{index}]", entry, wanted) from None
    raise wrong(name, value, f"a list, each {wanted}")


def _fields(kind: type[Message]) -> list[str]:
    return [field.name for field in kind.DESCRIPTOR.fields]


def entries(name: str, value: Any) -> list[Any]:
    """Of a list, or anything like one. Raises InvalidArgumentError for what is none, texts, bytes and mappings among
    it: their characters, numbers and keys are hardly meant."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise wrong(name, value, "a list")
    return list(value)


def mapping(name: str, value: Any) -> Mapping[Any, Any]:
    """Raises InvalidArgumentError for what is none."""
    if not isinstance(value, Mapping):
        raise wrong(name, value, "a mapping")
    return value


@contextmanager
def all_there(name: str) -> Iterator[None]:
    """Names the key that a mapping lacks."""
    try:
        yield
    except KeyError as error:
        raise InvalidArgumentError.of(f"{name}.{error.args[0]}", "is missing") from None


def json_text(name: str, value: Any) -> str:
    """Text as it is, anything else as JSON. Raises InvalidArgumentError for what has no JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError.of(name, f"cannot be written as JSON: {error}") from None


def seconds(name: str, value: Any) -> float:
    """At most MAX_SECONDS. Raises InvalidArgumentError for what is no number."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise wrong(name, value, "a number of seconds")
    return min(float(value), MAX_SECONDS)
