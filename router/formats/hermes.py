r"""Hermes and Qwen, from NousResearch/Hermes-Function-Calling and the chat templates of Qwen/Qwen3 and Qwen3-Coder:

    <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>
    <tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>

The second form is Qwen 3 Coder's. Several calls follow each other. Qwen 3 begins with `<think>\n…\n</think>\n\n`.
"""

import json
from functools import partial

from router.formats.events import Output
from router.formats.json_text import read_call
from router.formats.lark import Rules
from router.formats.parser import END_THINK, THINK, Calls
from router.formats.scanner import Scanner, Steps
from router.formats.spelling import CallableTool, Parts, Spelling, arguments_schema
from router.formats.tagged import Schemas, TaggedArguments

MARKERS = ("<tool_call>", "</tool_call>")


def calls(schemas: Schemas) -> Calls:
    return Calls("<tool_call>", partial(_read, schemas))


def spelling(_: str, *, thinks: bool) -> Spelling:
    """In JSON for Qwen 3 Coder, too: the values of its own form are held to no schema."""
    return Spelling(
        markers=frozenset((*MARKERS, THINK, END_THINK)),
        opening="<tool_call>",
        call=_write,
        between="\n<tool_call>",
        reasoning_opening=THINK if thinks else None,
        reasoning_end=END_THINK,
    )


def _write(tool: CallableTool, rules: Rules, parts: Parts) -> str:
    before = rules.literal(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    arguments = parts.add_schema(arguments_schema(tool.schema), tool.field)
    after = rules.literal("}\n</tool_call>")
    return f"{before} {arguments} {after}"


def _read(schemas: Schemas, scanner: Scanner, output: Output) -> Steps[None]:
    if (yield from scanner.expect("{", "<function=")) == "{":
        yield from read_call(scanner, output, "</tool_call>")
    else:
        yield from _read_function(schemas, scanner, output)
        yield from scanner.expect_end("</tool_call>")


def _read_function(schemas: Schemas, scanner: Scanner, output: Output) -> Steps[None]:
    name = yield from scanner.word()
    yield from scanner.expect(">")
    marker = yield from scanner.expect("<parameter=", "</function>")
    arguments = TaggedArguments(name, schemas, output)
    while marker == "<parameter=":
        key = yield from scanner.word()
        yield from scanner.expect(">")
        value = yield from scanner.until("</parameter>")
        arguments.add(key, value.removeprefix("\n").removesuffix("\n"))
        scanner.take()
        marker = yield from scanner.expect("<parameter=", "</function>")
    arguments.close()
    scanner.take()
