r"""GLM 4.5 and later, from the chat template of zai-org/GLM-4.5:

    <think>…</think>\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>

GLM 4.7 leaves out the line ends.
"""

from functools import partial

from router.formats.events import Output
from router.formats.parser import Calls
from router.formats.scanner import Scanner, Steps
from router.formats.tagged import Schemas, TaggedArguments

MARKERS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def calls(schemas: Schemas) -> Calls:
    return Calls("<tool_call>", partial(_read, schemas))


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
