"""The chat formats we know, how to tell them, and what reading an answer begins with."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from router.formats import deepseek, glm, harmony, hermes
from router.formats.parser import END_THINK, THINK, AnswerParser, Calls, answer_reader
from router.formats.spelling import Spelling
from router.formats.tagged import Schemas


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where an answer begins."""

    prompt: str
    """As rendered."""
    continued: str | None = None
    """The text at its end that the answer goes on with, where it does."""
    schemas: Schemas = field(default_factory=dict)
    template: str = ""
    """The chat template's text."""


class Place(enum.Enum):
    """Where in an answer the model is when it begins to write."""

    REASONING = enum.auto()
    """In reasoning that the prompt has opened."""
    BEFORE = enum.auto()
    """Before everything: it may reason."""
    ANSWER = enum.auto()
    """After reasoning, or there is none: content or calls come."""
    CONTENT = enum.auto()
    """Inside of content."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How models of a family write answers."""

    name: str
    markers: frozenset[str]
    """Those that are special tokens must be in the text for the parser."""
    parser: Callable[[Beginning], AnswerParser]
    spelling: Callable[[str], Spelling]
    """By the chat template's text."""
    place: Callable[[Beginning], Place]


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of one request are read."""

    format: ChatFormat
    beginning: Beginning

    def parser(self) -> AnswerParser:
        """A new one, for one answer."""
        return self.format.parser(self.beginning)


def _with_calls(calls: Callable[[Schemas], Calls], thinks: bool, beginning: Beginning) -> AnswerParser:
    is_reasoning = thinks and _is_thinking(beginning)
    return AnswerParser(answer_reader(calls(beginning.schemas), thinks=thinks), is_reasoning=is_reasoning)


def _is_thinking(beginning: Beginning) -> bool:
    """Whether the prompt has opened the reasoning."""
    if beginning.continued is None:
        return beginning.prompt.rstrip().endswith(THINK)
    return beginning.continued.rfind(THINK) > beginning.continued.rfind(END_THINK)


def _place(thinks: bool, beginning: Beginning) -> Place:
    if thinks and _is_thinking(beginning):
        return Place.REASONING
    if beginning.continued is not None:
        return Place.CONTENT
    is_closed = not thinks or beginning.prompt.rstrip().endswith(END_THINK)
    return Place.ANSWER if is_closed else Place.BEFORE


def _harmony_place(beginning: Beginning) -> Place:
    if harmony.is_reasoning(beginning.prompt):
        return Place.REASONING
    return Place.CONTENT if harmony.is_content(beginning.prompt) else Place.BEFORE


def _harmony(beginning: Beginning) -> AnswerParser:
    prompt = beginning.prompt
    return AnswerParser(harmony.reader(prompt), is_reasoning=harmony.is_reasoning(prompt))


_THINK = (THINK, END_THINK)
FORMATS = {
    chat_format.name: chat_format
    for chat_format in (
        ChatFormat(
            "hermes",
            frozenset(hermes.MARKERS),
            partial(_with_calls, hermes.calls, False),
            partial(hermes.spelling, thinks=False),
            partial(_place, False),
        ),
        ChatFormat(
            "qwen3",
            frozenset((*_THINK, *hermes.MARKERS)),
            partial(_with_calls, hermes.calls, True),
            partial(hermes.spelling, thinks=True),
            partial(_place, True),
        ),
        ChatFormat(
            "deepseek",
            frozenset((*_THINK, *deepseek.MARKERS)),
            partial(_with_calls, deepseek.calls, True),
            deepseek.spelling,
            partial(_place, True),
        ),
        ChatFormat(
            "glm",
            frozenset((*_THINK, *glm.MARKERS)),
            partial(_with_calls, glm.calls, True),
            glm.spelling,
            partial(_place, True),
        ),
        ChatFormat("harmony", frozenset(harmony.MARKERS), _harmony, harmony.spelling, _harmony_place),
    )
}
_SIGNS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3", ("<think>",)),
    ("qwen3", ("</think>",)),
    ("hermes", ("<tool_call>",)),
)
"""What stands in the chat template of a format; the first that fits. Reasoning between think tags is read whatever the
calls look like: those of a family that we do not know are text."""


def detect(template: str) -> ChatFormat | None:
    """By the text of the chat template alone. None: not known, answers are text."""
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name]
    return None
