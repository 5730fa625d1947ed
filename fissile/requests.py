"""From Python arguments to request messages. Shared by both clients; the router checks the values."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NotRequired, TypedDict

from fissile.arguments import all_there, entries, fill, json_text, mapping, wrong
from fissile.errors import InvalidArgumentError
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
    """A sequence of anything but numbers is several prompts. Raises InvalidArgumentError for what no message can
    hold."""
    request = fill(
        generation_pb2.GenerateRequest,
        model=model,
        request_id=request_id,
        add_special_tokens=add_special_tokens,
        options=generation_options(options),
    )
    if isinstance(prompt, str):
        request.MergeFrom(fill(generation_pb2.GenerateRequest, {"text": "prompt"}, text=prompt))
        return request
    parts = entries("prompt", prompt)
    if any(type(part) is not int and not isinstance(part, Integral) for part in parts):  # the second look is slow
        request.prompts.extend([_prompt(f"prompt[{index}]", part) for index, part in enumerate(parts)])
    else:
        request.tokens.CopyFrom(_prompt("prompt", parts).tokens)
    return request


def _prompt(name: str, prompt: Any) -> generation_pb2.Prompt:
    if isinstance(prompt, str):
        return fill(generation_pb2.Prompt, {"text": name}, text=prompt)
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise wrong(name, prompt, "a text or a list of token ids")
    tokens = fill(sampling_pb2.TokenSequence, {"token_ids": name}, token_ids=entries(name, prompt))
    return generation_pb2.Prompt(tokens=tokens)


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
    """Raises InvalidArgumentError for what no message can hold, such as a role that does not exist."""
    request = fill(
        generation_pb2.ChatRequest,
        model=model,
        request_id=request_id,
        messages=[_message(f"messages[{n}]", message) for n, message in enumerate(entries("messages", messages))],
        continue_final_message=continue_final_message,
        tools=[_tool(f"tools[{n}]", tool) for n, tool in enumerate(entries("tools", tools))],
        tool_choice=_tool_choice(mapping("tool_choice", tool_choice)) if tool_choice is not None else None,
        chat_template=chat_template,
        options=generation_options(options),
    )
    if template_arguments:
        try:
            request.template_arguments.update(mapping("template_arguments", template_arguments))
        except (TypeError, ValueError):
            raise InvalidArgumentError.of(
                "template_arguments", "names must be texts, and values those of JSON"
            ) from None
    return request


def _message(name: str, message: Message) -> generation_pb2.ChatMessage:
    with all_there(name):
        role = mapping(name, message)["role"]
    if role not in ROLES:
        raise wrong(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    rest: dict[str, Any] = {key: value for key, value in message.items() if key not in ("role", "tool_calls")}
    return fill(
        generation_pb2.ChatMessage,
        {},
        name,
        role=f"CHAT_ROLE_{role.upper()}",
        tool_calls=[
            _call(f"{name}.tool_calls[{number}]", call)
            for number, call in enumerate(entries(f"{name}.tool_calls", message.get("tool_calls") or ()))
        ],
        **rest,
    )


def _call(name: str, call: Call) -> generation_pb2.ToolCall:
    with all_there(name):
        arguments = json_text(f"{name}.arguments", mapping(name, call)["arguments"])
        return fill(generation_pb2.ToolCall, {}, name, id=call["id"], name=call["name"], arguments=arguments)


def _tool(name: str, tool: Tool) -> generation_pb2.Tool:
    with all_there(name):
        return fill(
            generation_pb2.Tool,
            {},
            name,
            name=mapping(name, tool)["name"],
            description=tool.get("description", ""),
            parameters=json_text(f"{name}.parameters", tool.get("parameters", "")),
        )


def _tool_choice(choice: Mapping[str, Any]) -> generation_pb2.ToolChoice:
    mode = choice.get("mode", "auto")
    if mode not in TOOL_CHOICES:
        raise wrong("tool_choice.mode", mode, f"one of {', '.join(TOOL_CHOICES)}")
    return fill(
        generation_pb2.ToolChoice,
        {},
        "tool_choice",
        mode=f"TOOL_CHOICE_MODE_{mode.upper()}",
        names=entries("tool_choice.names", choice.get("names", ())),
        single_call=choice.get("single_call", False),
    )


def tokenize_request(text: str, *, model: str, add_special_tokens: bool) -> generation_pb2.TokenizeRequest:
    """Raises InvalidArgumentError for what no message can hold, as the next ones do."""
    return fill(generation_pb2.TokenizeRequest, model=model, text=text, add_special_tokens=add_special_tokens)


def detokenize_request(
    token_ids: Sequence[int], *, model: str, skip_special_tokens: bool
) -> generation_pb2.DetokenizeRequest:
    return fill(
        generation_pb2.DetokenizeRequest, model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
    )


def stats_request(window: int) -> generation_pb2.GetStatsRequest:
    return fill(generation_pb2.GetStatsRequest, {"window_seconds": "window"}, window_seconds=window)
