"""From a conversation to a prompt, through the model's chat template (Jinja, rendered in a sandbox)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from fissile.errors import InvalidArgumentError
from fissile.v1 import ChatMessage, ChatRequest, ChatRole, Tool, ToolCall
from router.chat_template import ChatTemplate
from router.formats.registry import FORMATS, Beginning, Reading, detect

_ROLES: Mapping[int, str] = {
    ChatRole.CHAT_ROLE_SYSTEM: "system",
    ChatRole.CHAT_ROLE_USER: "user",
    ChatRole.CHAT_ROLE_ASSISTANT: "assistant",
    ChatRole.CHAT_ROLE_TOOL: "tool",
    ChatRole.CHAT_ROLE_DEVELOPER: "developer",
}
AUTO, NONE = "auto", "none"
"""In place of a format's name: the one that the template tells, or none."""
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
    found = detect(_source(template, request)) if chat_format == AUTO else FORMATS.get(chat_format)
    if found is None:
        return RenderedChat(text, None)
    continued = request.messages[-1].content if request.continue_final_message else None
    schemas = {t.name: _json_object(f"tools[{i}].parameters", t.parameters) for i, t in enumerate(request.tools)}
    return RenderedChat(text, Reading(found, Beginning(text, continued, schemas)))


def render(template: ChatTemplate, request: ChatRequest) -> str:
    """The prompt text. Raises InvalidArgumentError for a conversation the template refuses or cannot render."""
    source = _source(template, request)
    variables: dict[str, Any] = dict(template.variables)
    variables.update(_plain(MessageToDict(request.template_arguments)))
    variables.setdefault("add_generation_prompt", not request.continue_final_message)
    try:
        rendered: Sequence[str] = render_jinja_template(
            [[_message(i, m, source) for i, m in enumerate(request.messages)]],
            tools=_tools(request.tools),
            chat_template=source,
            continue_final_message=request.continue_final_message,
            **variables,
        )[0]
    except InvalidArgumentError:
        raise
    except TemplateError as error:
        blamed = "chat_template" if request.chat_template else "messages"
        raise InvalidArgumentError.of(blamed, f"the chat template refused: {error}") from error
    # A template is a program over what the client sent: whatever else it raises is about that input, too.
    except Exception as error:
        raise InvalidArgumentError.of("messages", f"the chat template failed: {error}") from error
    return rendered[0]


def _source(template: ChatTemplate, request: ChatRequest) -> str:
    return request.chat_template or (template.with_tools if request.tools else None) or template.default


def _message(position: int, message: ChatMessage, source: str) -> dict[str, Any]:
    """As the template `source` wants it: some differ from the others."""
    result: dict[str, Any] = {"role": _role(message.role, source), "content": message.content}
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
