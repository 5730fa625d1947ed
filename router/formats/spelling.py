"""How an answer is spelled in a chat format, for grammars: the counterpart of its parser, which must read all of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fissile.v1 import GrammarPart, StructuredOutput
from router.formats.lark import Rules, any_of

MAX_CALLS = 16
"""Of one answer that is held to a grammar: a small model might go on calling."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called."""

    field: str
    """Path of its parameters in the request."""
    name: str
    schema: Mapping[str, Any]
    """JSON schema of its arguments."""


class Parts:
    """The constraints that a grammar names, and which field of the request each comes from."""

    def __init__(self) -> None:
        self.messages: list[GrammarPart] = []
        self.fields: dict[str, str] = {}

    def add(self, constraint: StructuredOutput, field: str) -> str:
        """What stands for `constraint` in a rule. `field`: its path in the request."""
        name = f"part_{len(self.messages)}"
        self.messages.append(GrammarPart(name=name, constraint=constraint))
        self.fields[name] = field
        return f"@{name}"

    def add_schema(self, schema: object, field: str) -> str:
        return self.add(StructuredOutput(json_schema=json.dumps(schema)), field)


class WriteCall(Protocol):
    """Writes one call, from after the opening of calls, or of the call, to its end."""

    def __call__(self, tool: CallableTool, rules: Rules, parts: Parts) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """Texts of a format. Markers in them may be tokens."""

    markers: frozenset[str]
    opening: str
    """What calls begin with; it stands in no content."""
    call: WriteCall
    between: str = ""
    """Between calls."""
    closing: str = ""
    """After all of them."""
    max_calls: int = MAX_CALLS
    content_opening: str = ""
    """What content begins with."""
    reasoning_opening: str | None = None
    """None: there is no reasoning."""
    reasoning_end: str = ""
    """The marker that ends reasoning."""
    after_reasoning: str = ""
    """Between that and what follows."""

    def calls(self, tools: Sequence[CallableTool], rules: Rules, parts: Parts, *, is_single: bool) -> str:
        """One call or more, from after `opening`."""
        one = rules.rule(any_of(self.call(tool, rules, parts) for tool in tools))
        num_more = 0 if is_single else self.max_calls - 1
        more = f"({rules.literal(self.between)} {one}){{0,{num_more}}}" if num_more else ""
        closing = rules.literal(self.closing) if self.closing else ""
        return f"{one} {more} {closing}"


def arguments_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Of a tool's arguments: an object with what it declares and nothing else, unless it says otherwise. A tool without
    parameters has no arguments."""
    result: dict[str, Any] = dict(schema) if schema else {"type": "object", "properties": {}}
    if "properties" in result and not _OPEN & result.keys():
        result["additionalProperties"] = False
    return result


_OPEN = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref", "if",
}  # fmt: skip
"""Words of a schema that say more about properties."""
