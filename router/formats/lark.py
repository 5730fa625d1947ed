"""Writing a grammar in Lark syntax, as llguidance reads it."""

import json
import re
from collections.abc import Callable, Iterable

TokenId = Callable[[str], int | None]
"""The id of a token that a text has to itself, if it has one."""


class Rules:
    """Rules of one grammar. The methods return what stands for them in other rules.

    Whether the library takes a marker that is a token for that token or for its text depends on the tokenizer, so a
    marker is either of them."""

    def __init__(self, token_id: TokenId, markers: Iterable[str]) -> None:
        self._token_id = token_id
        longest_first = sorted(markers, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)))
        self._lines: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly this text, with its markers."""
        parts: list[str] = []
        end = 0
        for found in self._markers.finditer(text):
            parts += [json.dumps(text[end : found.start()])] if found.start() > end else []
            parts.append(self._marker(found[0]))
            end = found.end()
        if end < len(text) or not parts:
            parts.append(json.dumps(text[end:]))
        return " ".join(parts)

    def _marker(self, text: str) -> str:
        token_id = self._token_id(text)
        return json.dumps(text) if token_id is None else f"(<[{token_id}]> | {json.dumps(text)})"

    def text_without(self, marker: str) -> str:
        """Any text in which `marker` does not stand; may be empty."""
        name = f"T{len(self._lines)}"
        pattern = re.escape(marker).replace("/", r"\/")
        self._lines.append(f"{name}: /(?s:.+)/ & ~/(?s:.*){pattern}(?s:.*)/")
        return f"{name}?"

    def text_until(self, marker: str) -> str:
        """Any text, up to and including the first `marker`."""
        as_text = self.rule("/(?s:.*)/", f"[suffix={json.dumps(marker)}]")
        token_id = self._token_id(marker)
        if token_id is None:
            return as_text
        return f"({self.text_without(marker)} <[{token_id}]> | {as_text})"

    def written(self, start: str) -> str:
        """The grammar, from the body of its first rule."""
        return "\n".join([f"start: {start}", *self._lines]) + "\n"


def any_of(bodies: Iterable[str]) -> str:
    return f"({' | '.join(bodies)})"
