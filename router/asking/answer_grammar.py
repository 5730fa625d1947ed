"""What an answer is held to: constraints on its content and its calls, with the chat format's own words around them.

Reasoning is free: a constraint holds for what comes after it. To close the reasoning in place of the model would be
shorter, but models answer better that they were trained to think first, and `max_tokens` bounds it as it does anyway.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fissile.errors import FailedPreconditionError
from fissile.v1 import ChatRequest, CompositeGrammar, StructuredOutput, ToolChoice, ToolChoiceMode
from router.formats.lark import Rules, TokenId, any_of
from router.formats.registry import Place, Reading
from router.formats.spelling import CallableTool, Parts, Spelling

REQUIRED, NONE = ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED, ToolChoiceMode.TOOL_CHOICE_MODE_NONE
_CONTENT_FIELD = "options.sampling.structured_output"
_BLANKS = r"/\n{0,2}/"
"""What may follow reasoning: the parser leaves it out."""


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """In place of the request's own constraint."""

    constraint: StructuredOutput
    fields: Mapping[str, str]
    """Which field of the request each of its parts comes from."""


def holds_calls(choice: ToolChoice) -> bool:
    """Whether anything is asked of calls."""
    is_asked = choice.mode == REQUIRED or bool(choice.names) or choice.single_call
    return choice.mode != NONE and is_asked


def answer_grammar(request: ChatRequest, reading: Reading | None, token_id: TokenId) -> AnswerGrammar | None:
    """None: what the request says is all. Raises FailedPreconditionError where calls are to be held to something and
    the model's chat format is not known."""
    content = request.options.sampling.structured_output
    is_held = request.options.sampling.HasField("structured_output")
    holds = bool(request.tools) and holds_calls(request.tool_choice)
    if reading is None:
        if holds:
            raise FailedPreconditionError.of(
                "tool_choice", "the model's chat format is not known, so its calls cannot be held to anything"
            )
        return None
    tools = _callable_tools(request, reading)
    place = reading.format.place(reading.beginning)
    is_plain = place is Place.CONTENT or (place is Place.ANSWER and not tools)
    if not holds and (not is_held or is_plain):
        return None
    writer = _Writer(reading.format.spelling(reading.beginning.template), tools, request.tool_choice, token_id)
    return writer.written(place, content if is_held else None)


def _callable_tools(request: ChatRequest, reading: Reading) -> list[CallableTool]:
    names = set(request.tool_choice.names)
    if request.tool_choice.mode == NONE:
        return []
    return [
        CallableTool(f"tools[{i}].parameters", tool.name, reading.beginning.schemas[tool.name])
        for i, tool in enumerate(request.tools)
        if not names or tool.name in names
    ]


class _Writer:
    """Of one grammar."""

    def __init__(
        self, spelling: Spelling, tools: Sequence[CallableTool], choice: ToolChoice, token_id: TokenId
    ) -> None:
        self._spelling = spelling
        self._tools = tools
        self._choice = choice
        self._rules = Rules(token_id, spelling.markers)
        self._parts = Parts()

    def written(self, place: Place, content: StructuredOutput | None) -> AnswerGrammar:
        """`content`: what the content is held to."""
        if place is Place.CONTENT:
            start = self._content(content)
        else:
            start = f"{self._reasoning(place)} {self._answer(content)}"
        composite = CompositeGrammar(grammar=self._rules.written(start), parts=self._parts.messages)
        return AnswerGrammar(StructuredOutput(composite=composite), self._parts.fields)

    def _reasoning(self, place: Place) -> str:
        spelling, rules = self._spelling, self._rules
        if spelling.reasoning_opening is None or place is Place.ANSWER:
            return ""
        after = rules.literal(spelling.after_reasoning) if spelling.after_reasoning else f"{_BLANKS}?"
        rest = rules.rule(f"{rules.text_until(spelling.reasoning_end)} {after}")
        return rest if place is Place.REASONING else f"({rules.literal(spelling.reasoning_opening)} {rest})?"

    def _answer(self, content: StructuredOutput | None) -> str:
        """Content or calls; free text may stand before calls where the format lets it."""
        spelling, rules = self._spelling, self._rules
        opening = rules.literal(spelling.content_opening) if spelling.content_opening else ""
        alternatives: list[str] = []
        if not self._tools:
            return f"{opening} {self._content(content)}"
        calls = rules.rule(spelling.calls(self._tools, rules, self._parts, is_single=self._choice.single_call))
        alternatives.append(f"{rules.literal(spelling.opening)} {calls}")
        if self._choice.mode != REQUIRED:
            alternatives.append(rules.rule(f"{opening} {self._content(content)}"))
            if content is None and not opening:
                alternatives.append(f"{rules.text_until(spelling.opening)} {calls}")
        return any_of(alternatives)

    def _content(self, content: StructuredOutput | None) -> str:
        if content is None:
            return self._rules.text_without(self._spelling.opening)
        field = f"{_CONTENT_FIELD}.{content.WhichOneof('constraint')}"
        return self._parts.add(content, field)
