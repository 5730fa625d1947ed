r"""GLM 4.5 and later, from the chat template of zai-org/GLM-4.5:

    <think>…</think>\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>

GLM 4.7 leaves out the line ends.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fissile.errors import FailedPreconditionError
from fissile.v1 import Choice, StructuredOutput
from router.formats.events import Output
from router.formats.lark import Rules
from router.formats.parser import END_THINK, THINK, Calls
from router.formats.scanner import Scanner, Steps
from router.formats.spelling import CallableTool, Parts, Spelling
from router.formats.tagged import Schemas, TaggedArguments, is_string

MARKERS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def calls(schemas: Schemas) -> Calls:
    return Calls("<tool_call>", partial(_read, schemas))


def spelling(_: str) -> Spelling:
    return Spelling(
        markers=frozenset((*MARKERS, THINK, END_THINK)),
        opening="<tool_call>",
        call=_write,
        between="\n<tool_call>",
        reasoning_opening=THINK,
        reasoning_end=END_THINK,
    )


def _write(tool: CallableTool, rules: Rules, parts: Parts) -> str:
    """Arguments in the order of the schema. Raises FailedPreconditionError for one that says more than their names."""
    _require(tool, tool.schema.keys() - _KNOWN)
    required = tool.schema.get("required", ())
    written = [rules.literal(f"{tool.name}\n")]
    for name, schema in tool.schema.get("properties", {}).items():
        before = rules.literal(f"<arg_key>{name}</arg_key>\n<arg_value>")
        argument = rules.rule(f"{before} {_write_value(tool, schema, rules, parts)} {rules.literal(chr(10))}")
        written.append(argument if name in required else f"{argument}?")
    return " ".join([*written, rules.literal("</tool_call>")])


def _write_value(tool: CallableTool, schema: Any, rules: Rules, parts: Parts) -> str:
    """With its closing tag. Strings are written as they are, all else as JSON."""
    closing = "</arg_value>"
    if not is_string(schema):
        whole = schema if isinstance(schema, bool) else {**_definitions(tool.schema), **schema}
        return f"{parts.add_schema(whole, tool.field)} {rules.literal(closing)}"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        chosen = StructuredOutput(choice=Choice(choices=choices))
        return f"{parts.add(chosen, tool.field)} {rules.literal(closing)}"
    _require(tool, schema.keys() & _LIMITS)
    return rules.text_until(closing)


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a property may refer to."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _require(tool: CallableTool, refused: set[str]) -> None:
    if refused:
        words = ", ".join(sorted(refused))
        raise FailedPreconditionError.of(tool.field, f"a call in this model's format cannot be held to {words}")


_KNOWN = {
    "type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions", "$schema",
}  # fmt: skip
_LIMITS = {"pattern", "format", "minLength", "maxLength", "anyOf", "oneOf"}
"""Words about strings that JSON could be held to."""


def _read(schemas: Schemas, scanner: Scanner, output: Output) -> Steps[None]:
    name = yield from scanner.word()
    marker = yield from scanner.expect("<arg_key>", "</tool_call>")
    arguments = TaggedArguments(name, schemas, output)
    while marker == "<arg_key>":
        key = yield from scanner.until("</arg_key>")
        yield from scanner.expect("<arg_value>")
        value = yield from scanner.until("</arg_value>")
        arguments.add(key.strip(), value)
        scanner.take()
        marker = yield from scanner.expect("<arg_key>", "</tool_call>")
    arguments.close()
