"""Calls whose arguments stand between tags, one by one, and become JSON here.

Strings are written as they are and other values as JSON; which is which, the tool's JSON schema says. An argument is
emitted when it is complete. What is cut off leaves the JSON object open, so that nobody takes it for the whole.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from router.formats.events import Output

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments by name of the tool."""


class TaggedArguments:
    """Of one call."""

    __slots__ = ("_is_empty", "_output", "_properties")

    def __init__(self, name: str, schemas: Schemas, output: Output) -> None:
        output.start_call(name)
        properties = schemas.get(name, {}).get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        self._output = output
        self._is_empty = True

    def add(self, key: str, text: str) -> None:
        before = "{" if self._is_empty else ", "
        self._is_empty = False
        value = as_json(text, self._properties.get(key))
        self._output.arguments(f"{before}{_quoted(key)}: {value}")

    def close(self) -> None:
        self._output.arguments("{}" if self._is_empty else "}")


def as_json(text: str, schema: object) -> str:
    """A value as JSON. Text that is no JSON is a string, whatever the schema says."""
    if is_string(schema):
        return _quoted(text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(text)
    return text.strip()


def is_string(schema: object) -> bool:
    """Whether every value that fits is a string."""
    if not isinstance(schema, dict):
        return False
    if isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    if "const" in schema:
        return isinstance(schema["const"], str)
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(alternatives, list):
            return all(map(is_string, alternatives))
    return schema.get("type") in ("string", ["string"])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
