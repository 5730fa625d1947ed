r"""GPT-OSS, from "OpenAI harmony response format" (openai-cookbook, articles/openai-harmony.md):

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The prompt ends with `<|start|>assistant`. A recipient may also stand before the channel. Channel analysis is reasoning;
a message to a recipient is a call, whatever its channel; everything else is for the user. Markers are special tokens.
"""

import re
from collections.abc import Callable

from router.formats.events import Output
from router.formats.lark import Rules
from router.formats.parser import Reader
from router.formats.scanner import EndOfText, Malformed, Markers, Scanner, Steps
from router.formats.spelling import CallableTool, Parts, Spelling, arguments_schema

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_BODY_END = Markers(*MARKERS)
_HEADER = re.compile(r"(?: *(?:<\|(?:channel|constrain)\|>|[^\s<]+)){0,8} *")
"""Role, recipient, channel, recipient, type, with two markers: more is no header, nor is a line end."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|> *analysis\b")

Emit = Callable[[str], None]


def is_reasoning(prompt: str) -> bool:
    """Whether the prompt ends inside of reasoning."""
    header, message, _ = _last_message(prompt)
    return bool(message) and _ANALYSIS.search(header) is not None


def is_content(prompt: str) -> bool:
    """Whether the prompt ends inside of a message for the user."""
    return bool(_last_message(prompt)[1]) and not is_reasoning(prompt)


def spelling(_: str) -> Spelling:
    """A call ends the answer."""
    return Spelling(
        markers=frozenset(MARKERS),
        opening=f"{_CHANNEL}commentary to=functions.",
        call=_write,
        max_calls=1,
        content_opening=f"{_CHANNEL}final{_MESSAGE}",
        reasoning_opening=f"{_CHANNEL}analysis{_MESSAGE}",
        reasoning_end="<|end|>",
        after_reasoning=f"{_START}assistant",
    )


def _write(tool: CallableTool, rules: Rules, parts: Parts) -> str:
    before = rules.literal(f"{tool.name} {_CONSTRAIN}json{_MESSAGE}")
    return f"{before} {parts.add_schema(arguments_schema(tool.schema), tool.field)}"


def reader(prompt: str) -> Reader:
    """The prompt ends in a header, or inside of a message that is to be continued."""
    _, message, _ = _last_message(prompt)

    def read(scanner: Scanner, output: Output) -> Steps[None]:
        emit: Emit = output.reasoning if output.is_reasoning else output.content
        if not message:
            emit = yield from _read_header(scanner, output)
        while True:
            marker = yield from scanner.text_until(_BODY_END, emit)
            if marker in (_START, _CHANNEL):
                output.is_reasoning = False
                emit = yield from _read_header(scanner, output)
                continue
            scanner.take()
            if marker in _ENDS:
                output.is_reasoning = False
                emit = output.content

    return read


def _last_message(prompt: str) -> tuple[str, str, str]:
    """Its header, the marker after it, if there is one, and its text."""
    return prompt.rpartition(_START)[2].partition(_MESSAGE)


def _read_header(scanner: Scanner, output: Output) -> Steps[Emit]:
    """Where the text after it belongs. What is no header is content. One that is cut off is dropped, unless it is
    of a call, or has no marker at all: then it was a text without any."""
    try:
        yield from _find_message(scanner)
    except Malformed:
        output.content(scanner.take())
        return output.content
    except EndOfText:
        header = scanner.take_all()
        if _RECIPIENT.search(header) or "<|" not in header:
            output.content(header)
        raise
    header = scanner.take()
    recipient = _RECIPIENT.search(header)
    if recipient:
        output.start_call(recipient[1].removeprefix("functions."))
        return output.arguments
    output.is_reasoning = _ANALYSIS.search(header) is not None
    return output.reasoning if output.is_reasoning else output.content


def _find_message(scanner: Scanner) -> Steps[None]:
    """Read a header and the marker at its end."""
    start = scanner.at
    while True:
        found = _HEADER.match(scanner.text, start)
        scanner.at = found.end() if found else start
        rest = scanner.text[scanner.at : scanner.at + len(_CONSTRAIN)]
        if rest.startswith(_MESSAGE):
            scanner.at += len(_MESSAGE)
            return
        if not any(marker.startswith(rest) and marker != rest for marker in (_MESSAGE, _CHANNEL, _CONSTRAIN)):
            raise Malformed
        yield from scanner.more()
