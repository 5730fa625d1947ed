r"""DeepSeek, from the chat templates of deepseek-ai/DeepSeek-V3, -R1 and, the second form, -V3.1:

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>

All calls together stand between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, which say nothing.
Reasoning stands between `<think>` and `</think>`.
"""

from router.formats.events import Output
from router.formats.json_text import read_structure
from router.formats.parser import Calls
from router.formats.scanner import Malformed, Scanner, Steps
from router.formats.tagged import Schemas

_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
MARKERS = (_BEGIN, _SEPARATOR, _END, *_AROUND)


def calls(_: Schemas) -> Calls:
    return Calls(_BEGIN, _read, around=_AROUND)


def _read(scanner: Scanner, output: Output) -> Steps[None]:
    name = yield from scanner.word()
    yield from scanner.expect(_SEPARATOR)
    is_fenced = (yield from scanner.peek()) != "{"
    if is_fenced:  # so far it was the kind of call
        name = yield from scanner.word()
        yield from scanner.expect("```json")
    if (yield from scanner.peek()) != "{":
        raise Malformed
    output.start_call(name)
    scanner.take()
    yield from read_structure(scanner, output.arguments)
    if is_fenced:
        yield from scanner.expect_end("```")
    yield from scanner.expect_end(_END)
