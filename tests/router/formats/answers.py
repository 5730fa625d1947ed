"""Answers read by a parser, put together."""

from dataclasses import dataclass, field

from router.formats.events import CallArguments, CallStart, Content, Reasoning
from router.formats.registry import FORMATS, Beginning

PROMPTS = {"harmony": "<|start|>user<|message|>hi<|end|><|start|>assistant"}
"""What a prompt of the format ends with, where it matters."""


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each."""

    def add(self, event) -> None:
        match event:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallStart(index, name):
                assert index == len(self.calls)
                self.calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(self.calls) - 1
                self.calls[index][1] += text


def parser(name, prompt=None, continued=None, schemas=None):
    prompt = PROMPTS.get(name, "") if prompt is None else prompt
    return FORMATS[name].parser(Beginning(prompt, continued, schemas or {}))


def read(name, *pieces, **beginning) -> Answer:
    answer = Answer()
    reader = parser(name, **beginning)
    for piece in pieces:
        for event in reader.feed(piece):
            answer.add(event)
    for event in reader.flush():
        answer.add(event)
    return answer


def shown(name, *pieces, **beginning) -> list[list]:
    """Events of each piece, then of the end."""
    reader = parser(name, **beginning)
    return [*(reader.feed(piece) for piece in pieces), reader.flush()]
