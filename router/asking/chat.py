"""From a conversation to a prompt, through the model's chat template (Jinja, rendered in a sandbox)."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.json_format import MessageToDict
from jinja2 import TemplateError

from common import jinja
from fissile.errors import FailedPreconditionError, InvalidArgumentError
from fissile.v1 import ChatMessage, ChatRequest, ChatRole, Tool, ToolCall, ToolChoiceMode
from router.formats.registry import FORMATS, Beginning, Reading, detect
from router.model.chat_template import ChatTemplate
from router.model.template_traits import traits_of

_ROLES: Mapping[int, str] = {
    ChatRole.CHAT_ROLE_SYSTEM: "system",
    ChatRole.CHAT_ROLE_USER: "user",
    ChatRole.CHAT_ROLE_ASSISTANT: "assistant",
    ChatRole.CHAT_ROLE_TOOL: "tool",
    ChatRole.CHAT_ROLE_DEVELOPER: "developer",
}
AUTO, NONE = "auto", "none"
"""In place of a format's name: the one that the template tells, or none."""
_MAX_ARGUMENTS_TRIED = 32
"""One by one, to find out which the template does not like."""
_JOINS_TEXT = "<｜tool▁call▁begin｜>"
"""DeepSeek's templates, which have it, join arguments to the prompt as text, and want None in place of no content."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as a prompt."""

    text: str
    reading: Reading | None
    """How its answers are read; None: they are text."""


def render_chat(template: ChatTemplate, request: ChatRequest, chat_format: str) -> RenderedChat:
    """`chat_format`: the name of a format, AUTO or NONE. Raises as `render` does."""
    text = render(template, request)
    source = _source(template, request)
    found = detect(source) if chat_format == AUTO else FORMATS.get(chat_format)
    if found is None:
        return RenderedChat(text, None)
    continued = request.messages[-1].content if request.continue_final_message else None
    schemas = {t.name: _json_object(f"tools[{i}].parameters", t.parameters) for i, t in enumerate(request.tools)}
    return RenderedChat(text, Reading(found, Beginning(text, continued, schemas, source)))


def render(template: ChatTemplate, request: ChatRequest) -> str:
    """The prompt text. Raises InvalidArgumentError for a conversation the template refuses or cannot render, and
    FailedPreconditionError for one with something that it does not show."""
    source = _source(template, request)
    traits = traits_of(source)
    tools = _tools(request.tools) if _offers_tools(request) else None
    if tools and not traits.knows_tools:
        raise FailedPreconditionError.of(
            "tools", "the model's chat template does not show tools, so the model would not know of them"
        )
    messages = [_message(i, m, source, traits.wants_parts) for i, m in enumerate(request.messages)]
    arguments: dict[str, Any] = _plain(MessageToDict(request.template_arguments))
    attempt = partial(_attempt, template, source, messages, request)
    try:
        text = attempt(tools, arguments)
    # A template is a program over what the client sent: whatever it raises is about that input.
    except Exception as error:
        raise _fault(error, attempt, tools, arguments, request) from error
    if not traits.shows_content:
        _check_shown(request, text)
    return text


def _attempt(
    template: ChatTemplate,
    source: str,
    messages: list[dict[str, Any]],
    request: ChatRequest,
    tools: list[Any] | None,
    arguments: Mapping[str, Any],
) -> str:
    variables = {**template.variables, **arguments}
    variables.setdefault("add_generation_prompt", not request.continue_final_message)
    return jinja.render(source, messages, tools, variables, continues=request.continue_final_message)


def _fault(
    error: Exception,
    attempt: Callable[[list[Any] | None, Mapping[str, Any]], str],
    tools: list[Any] | None,
    arguments: Mapping[str, Any],
    request: ChatRequest,
) -> InvalidArgumentError:
    """Whatever the template renders without is at fault: an argument, all of them, or the tools."""
    word = "refused" if isinstance(error, TemplateError) else "failed"
    text = f"the chat template {word}: {error}"
    if arguments and _renders(attempt, tools, {}):
        for name in sorted(arguments)[:_MAX_ARGUMENTS_TRIED]:
            if _renders(attempt, tools, {key: value for key, value in arguments.items() if key != name}):
                return InvalidArgumentError.of(f"template_arguments.{name}", text)
        return InvalidArgumentError.of("template_arguments", text)
    if tools and _renders(attempt, None, arguments):
        return InvalidArgumentError.of("tools", text)
    return InvalidArgumentError.of("chat_template" if request.chat_template else "messages", text)


def _renders(
    attempt: Callable[[list[Any] | None, Mapping[str, Any]], str],
    tools: list[Any] | None,
    arguments: Mapping[str, Any],
) -> bool:
    try:
        attempt(tools, arguments)
    except Exception:
        return False
    return True


def _check_shown(request: ChatRequest, text: str) -> None:
    """Of a template that was not seen to show what users say. Raises FailedPreconditionError."""
    for i, message in enumerate(request.messages):
        if message.role == ChatRole.CHAT_ROLE_USER and message.content.strip() not in text:
            raise FailedPreconditionError.of(
                f"messages[{i}].content", "the model's chat template does not show it to the model"
            )


def _offers_tools(request: ChatRequest) -> bool:
    return bool(request.tools) and request.tool_choice.mode != ToolChoiceMode.TOOL_CHOICE_MODE_NONE


def _source(template: ChatTemplate, request: ChatRequest) -> str:
    return request.chat_template or (template.with_tools if _offers_tools(request) else None) or template.default


def _message(position: int, message: ChatMessage, source: str, wants_parts: bool) -> dict[str, Any]:
    """As the template `source` wants it: some differ from the others."""
    content: Any = [{"type": "text", "text": message.content}] if wants_parts else message.content
    result: dict[str, Any] = {"role": _role(message.role, source), "content": content}
    if message.name:
        result["name"] = message.name
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        result["reasoning"] = result["reasoning_content"] = message.reasoning
        # GPT-OSS's template refuses its name for it beside the text of a message with calls.
        is_refused = message.content and message.tool_calls
        result["thinking"] = None if is_refused else message.reasoning
    if message.tool_calls:
        joins_text = _JOINS_TEXT in source
        result["tool_calls"] = [
            _call(f"messages[{position}].tool_calls[{i}].arguments", call, as_text=joins_text)
            for i, call in enumerate(message.tool_calls)
        ]
        if joins_text and not message.content:
            result["content"] = None
    return result


def _role(role: int, source: str) -> str:
    """Templates that know no developer would leave out what he says, or refuse it."""
    name = _ROLES[role]
    return "system" if name == "developer" and name not in source else name


def _call(field: str, call: ToolCall, *, as_text: bool) -> dict[str, Any]:
    arguments = _json_object(field, call.arguments)
    function = {"name": call.name, "arguments": (call.arguments or "{}") if as_text else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tools(tools: Sequence[Tool]) -> list[Any] | None:
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": _json_object(f"tools[{i}].parameters", tool.parameters),
            },
        }
        for i, tool in enumerate(tools)
    ]


def _json_object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidArgumentError.of(field, f"must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError.of(field, "must be a JSON object")
    return value


def _plain(value: Any) -> Any:
    """Struct knows only floats; templates compare and index with whole numbers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
