r"""DeepSeek, from the chat templates of deepseek-ai/DeepSeek-V3, -R1 and, the second form, -V3.1:

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>

All calls together stand between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, which say nothing.
Reasoning stands between `<think>` and `</think>`.
"""

from router.formats.events import Output
from router.formats.json_text import read_structure
from router.formats.lark import Rules
from router.formats.parser import END_THINK, THINK, Calls
from router.formats.scanner import Malformed, Scanner, Steps
from router.formats.spelling import CallableTool, Parts, Spelling, arguments_schema
from router.formats.tagged import Schemas

_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```json"
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
MARKERS = (_BEGIN, _SEPARATOR, _END, *_AROUND)


def calls(_: Schemas) -> Calls:
    return Calls(_BEGIN, _read, around=_AROUND)


def spelling(template: str) -> Spelling:
    """The template tells which of the two forms the model knows."""
    is_fenced = _FENCE in template
    return Spelling(
        markers=frozenset((*MARKERS, THINK, END_THINK)),
        opening=_AROUND[0],
        call=_write_fenced if is_fenced else _write,
        between="\n" if is_fenced else "",
        closing=_AROUND[1],
        reasoning_opening=THINK,
        reasoning_end=END_THINK,
    )


def _write(tool: CallableTool, rules: Rules, parts: Parts) -> str:
    before = rules.literal(f"{_BEGIN}{tool.name}{_SEPARATOR}")
    arguments = parts.add_schema(arguments_schema(tool.schema), tool.field)
    return f"{before} {arguments} {rules.literal(_END)}"


def _write_fenced(tool: CallableTool, rules: Rules, parts: Parts) -> str:
    before = rules.literal(f"{_BEGIN}function{_SEPARATOR}{tool.name}\n{_FENCE}\n")
    arguments = parts.add_schema(arguments_schema(tool.schema), tool.field)
    after = rules.literal(f"\n```{_END}")
    return f"{before} {arguments} {after}"


def _read(scanner: Scanner, output: Output) -> Steps[None]:
    name = yield from scanner.word()
    yield from scanner.expect(_SEPARATOR)
    is_fenced = (yield from scanner.peek()) != "{"
    if is_fenced:  # so far it was the kind of call
        name = yield from scanner.word()
        yield from scanner.expect(_FENCE)
    if (yield from scanner.peek()) != "{":
        raise Malformed
    output.start_call(name)
    scanner.take()
    yield from read_structure(scanner, output.arguments)
    if is_fenced:
        yield from scanner.expect_end("```")
    yield from scanner.expect_end(_END)
