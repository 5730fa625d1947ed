"""From Python arguments to request messages. Shared by both clients; the router checks the values."""

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NotRequired, TypedDict

from fissile.options import Options, generation_options
from fissile.v1 import generation_pb2, sampling_pb2

ROLES = ("system", "developer", "user", "assistant", "tool")

Prompt = str | Sequence[int]
"""Text or token ids."""
Json = str | Mapping[str, Any]
"""JSON text, or an object to make it of."""


class Call(TypedDict):
    """A call of a tool, as a message of the assistant carries it."""

    id: str
    name: str
    arguments: Json


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    """One of ROLES."""
    content: str
    name: NotRequired[str]
    """Of the speaker or of the tool."""
    tool_call_id: NotRequired[str]
    """Of role tool: which call this answers."""
    tool_calls: NotRequired[Sequence[Call]]
    """Of role assistant."""
    reasoning: NotRequired[str]
    """Of role assistant."""


TOOL_CHOICES = ("auto", "none", "required")


class ToolChoice(TypedDict, total=False):
    """What an answer must do with tools."""

    mode: Literal["auto", "none", "required"]
    """Default auto: the model decides."""
    names: Sequence[str]
    """The only tools that may be called; all of them are shown to the model."""
    single_call: bool
    """At most one call."""


class Tool(TypedDict):
    """What the model may call."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[Json]
    """JSON schema of the arguments."""


def generate_request(
    prompt: Prompt | Sequence[Prompt],
    *,
    model: str,
    request_id: str,
    add_special_tokens: bool,
    options: Options,
) -> generation_pb2.GenerateRequest:
    """A sequence of anything but numbers is several prompts."""
    request = generation_pb2.GenerateRequest(
        model=model,
        request_id=request_id,
        add_special_tokens=add_special_tokens,
        options=generation_options(options),
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif any(not isinstance(entry, Integral) for entry in prompt):
        request.prompts.extend([_prompt(entry) for entry in prompt])
    else:
        request.tokens.CopyFrom(_prompt(prompt).tokens)
    return request


def _prompt(prompt: Any) -> generation_pb2.Prompt:
    if isinstance(prompt, str):
        return generation_pb2.Prompt(text=prompt)
    return generation_pb2.Prompt(tokens=sampling_pb2.TokenSequence(token_ids=prompt))


def chat_request(
    messages: Sequence[Message],
    *,
    model: str,
    request_id: str,
    continue_final_message: bool,
    tools: Sequence[Tool],
    tool_choice: ToolChoice | None,
    template_arguments: Mapping[str, Any],
    chat_template: str,
    options: Options,
) -> generation_pb2.ChatRequest:
    """Raises TypeError or ValueError for what the messages cannot hold, such as a role that does not exist."""
    request = generation_pb2.ChatRequest(
        model=model,
        request_id=request_id,
        messages=[_message(message) for message in messages],
        continue_final_message=continue_final_message,
        tools=[_tool(tool) for tool in tools],
        tool_choice=_tool_choice(tool_choice) if tool_choice is not None else None,
        chat_template=chat_template,
        options=generation_options(options),
    )
    if template_arguments:
        request.template_arguments.update(template_arguments)
    return request


def _message(message: Message) -> generation_pb2.ChatMessage:
    if message["role"] not in ROLES:
        raise ValueError(f"role {message['role']!r}: not one of {', '.join(ROLES)}")
    rest: dict[str, Any] = {name: value for name, value in message.items() if name not in ("role", "tool_calls")}
    return generation_pb2.ChatMessage(
        role=f"CHAT_ROLE_{message['role'].upper()}",
        tool_calls=[
            generation_pb2.ToolCall(id=call["id"], name=call["name"], arguments=_json(call["arguments"]))
            for call in message.get("tool_calls", ())
        ],
        **rest,
    )


def _tool(tool: Tool) -> generation_pb2.Tool:
    return generation_pb2.Tool(
        name=tool["name"], description=tool.get("description", ""), parameters=_json(tool.get("parameters", ""))
    )


def _tool_choice(choice: ToolChoice) -> generation_pb2.ToolChoice:
    mode = choice.get("mode", "auto")
    if mode not in TOOL_CHOICES:
        raise ValueError(f"tool_choice {mode!r}: not one of {', '.join(TOOL_CHOICES)}")
    return generation_pb2.ToolChoice(
        mode=f"TOOL_CHOICE_MODE_{mode.upper()}",
        names=choice.get("names", ()),
        single_call=choice.get("single_call", False),
    )


def _json(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)
