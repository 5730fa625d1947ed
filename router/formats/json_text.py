"""JSON that comes in pieces, and calls written in it."""

import json
import re
from collections.abc import Callable

from router.formats.events import Output
from router.formats.scanner import Malformed, Scanner, Steps

_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""The inside of a string, as far as it is there; a backslash without its character is left."""
_BETWEEN = re.compile(r"[\s\w.+\-:,]*")
"""What stands outside of strings besides brackets."""
_SCALAR = re.compile(r"[\w.+\-]*")


def read_structure(scanner: Scanner, emit: Callable[[str], None] | None = None) -> Steps[bool]:
    """Read an object or array, its opening bracket first, up to the bracket that closes it. True: it is closed; False:
    what comes next cannot be JSON. With `emit`, what is read is taken and emitted as it comes.

    Only brackets and strings are looked at: text inside of a string is never mistaken for anything else, and what the
    model wrote arrives as it wrote it."""
    depth, in_string = 0, False
    while True:
        found = (_STRING if in_string else _BETWEEN).match(scanner.text, scanner.at)
        scanner.at = found.end() if found else scanner.at
        char = scanner.text[scanner.at : scanner.at + 1]
        if in_string and char == '"':
            in_string = False
        elif in_string or not char:
            if emit:
                emit(scanner.take())
            yield from scanner.more()
            continue
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        else:
            depth = -1
        scanner.at += depth >= 0
        if depth <= 0 and not in_string:
            if emit:
                emit(scanner.take())
            return depth == 0


def read_string(scanner: Scanner) -> Steps[str]:
    """Read a string; returns its JSON text. Raises Malformed when it is none."""
    if (yield from scanner.peek()) != '"':
        raise Malformed
    start = scanner.at
    end = start + 1
    while True:
        found = _STRING.match(scanner.text, end)
        end = found.end() if found else end
        if scanner.text[end : end + 1] == '"':
            break
        yield from scanner.more()
    scanner.at = end + 1
    return scanner.text[start : scanner.at]


def read_value(scanner: Scanner) -> Steps[str]:
    """Read any value; returns its JSON text. Raises Malformed when there is none."""
    first = yield from scanner.peek()
    if first == '"':
        return (yield from read_string(scanner))
    start = scanner.at
    if first in "{[":
        if not (yield from read_structure(scanner)):
            raise Malformed
        return scanner.text[start : scanner.at]
    while True:
        found = _SCALAR.match(scanner.text, start)
        scanner.at = found.end() if found else start
        if scanner.at < len(scanner.text):
            break
        yield from scanner.more()
    if scanner.at == start:
        raise Malformed
    return scanner.text[start : scanner.at]


def read_call(scanner: Scanner, output: Output, closing: str) -> Steps[None]:
    """Read `{"name": …, "arguments": {…}}` from after its first brace, and then `closing`.

    The arguments are emitted as they come once the name is known, else at the end. A brace missing or too many before
    `closing` does not matter, nor does the text's end in place of it. Raises Malformed."""
    members: dict[str, str] = {}
    is_started = False
    while True:
        key = _decoded((yield from read_string(scanner)))
        yield from scanner.expect(":")
        is_named = key == "arguments" and "name" in members and not is_started
        if is_named and (yield from scanner.peek()) == "{":
            output.start_call(_name(members))
            is_started = True
            scanner.take()
            yield from read_structure(scanner, output.arguments)
        else:
            members[key] = yield from read_value(scanner)
        expect = scanner.expect_end if is_started else scanner.expect
        marker = yield from expect(",", "}", closing)
        if marker != ",":
            break
    if not is_started:
        name, arguments = _name(members), _arguments(members)
        output.start_call(name)
        output.arguments(arguments)
        scanner.take()
    while marker != closing:
        marker = yield from scanner.expect_end("}", closing)


def _decoded(text: str) -> str:
    """Of a string's JSON text."""
    try:
        return str(json.loads(text, strict=False))
    except json.JSONDecodeError:
        raise Malformed from None


def _name(members: dict[str, str]) -> str:
    text = members.get("name", "")
    name = _decoded(text) if text.startswith('"') else ""
    if not name:
        raise Malformed
    return name


def _arguments(members: dict[str, str]) -> str:
    """An object. Some models write it into a string, or leave out an empty one; under another name it is no call."""
    if "arguments" not in members and len(members) > 1:
        raise Malformed
    text = members.get("arguments", "null")
    if text.startswith('"'):
        text = _decoded(text)
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise Malformed
    return text
