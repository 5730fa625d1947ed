"""From JSON bodies to the messages of the contract. Nothing is checked here: `router.asking.validation` will."""

import json
from typing import Any

from google.protobuf.struct_pb2 import Struct

from fissile.errors import InvalidArgumentError
from fissile.v1 import (
    ChatMessage,
    ChatRequest,
    ChatRole,
    Choice,
    GenerateRequest,
    GenerationOptions,
    LogitBias,
    OutputOptions,
    Prompt,
    SamplingParams,
    StructuredOutput,
    TokenSequence,
    Tool,
    ToolCall,
    ToolChoice,
    ToolChoiceMode,
)
from router.http.bodies import CompletionBody, GenerationBody
from router.http.chat_body import ChatBody, Message
from router.http.field_names import CHAT_NAMES, COMPLETION_NAMES, FieldNames

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, of /v1/completions. A chat answers as long as the model's context lasts."""

_ROLES = {
    "system": ChatRole.CHAT_ROLE_SYSTEM,
    "developer": ChatRole.CHAT_ROLE_DEVELOPER,
    "user": ChatRole.CHAT_ROLE_USER,
    "assistant": ChatRole.CHAT_ROLE_ASSISTANT,
    "tool": ChatRole.CHAT_ROLE_TOOL,
}
_MODES = {
    "auto": ToolChoiceMode.TOOL_CHOICE_MODE_AUTO,
    "none": ToolChoiceMode.TOOL_CHOICE_MODE_NONE,
    "required": ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED,
}
_STRUCTURE = "options.sampling.structured_output"


def completion_request(body: CompletionBody, request_id: str, heartbeat: float) -> GenerateRequest:
    """`heartbeat`: seconds, for streams."""
    options = _options(body, heartbeat)
    options.max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.logprobs is not None:
        options.sampling.num_logprobs = body.logprobs
        if body.echo:
            options.sampling.num_prompt_logprobs = body.logprobs
            options.output.prompt_token_ids = True
    request = GenerateRequest(
        model=body.model,
        request_id=request_id,
        add_special_tokens=body.add_special_tokens is not False,
        options=options,
    )
    if len(body.prompt) > 1:
        request.prompts.extend(_prompt(prompt) for prompt in body.prompt)
    elif isinstance(body.prompt[0], str):
        request.text = body.prompt[0]
    else:
        request.tokens.CopyFrom(TokenSequence(token_ids=body.prompt[0]))
    return request


def completion_names(body: CompletionBody) -> FieldNames:
    return COMPLETION_NAMES.with_own(_structure_name(body))


def chat_request(body: ChatBody, request_id: str, heartbeat: float) -> ChatRequest:
    """`heartbeat`: seconds, for streams. Raises InvalidArgumentError for numbers that protobuf cannot carry."""
    options = _options(body, heartbeat)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None:
        options.max_tokens = max_tokens
    if body.logprobs:
        options.sampling.num_logprobs = body.top_logprobs or 0
    return ChatRequest(
        model=body.model,
        request_id=request_id,
        messages=[_message(message) for message in body.messages],
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        template_arguments=_template_arguments(body),
        chat_template=body.chat_template,
        continue_final_message=bool(body.continue_final_message),
        options=options,
    )


def chat_names(body: ChatBody) -> FieldNames:
    own = _structure_name(body)
    if body.max_completion_tokens is not None:
        own["options.max_tokens"] = "max_completion_tokens"
    return CHAT_NAMES.with_own(own)


def _options(body: GenerationBody, heartbeat: float) -> GenerationOptions:
    output = OutputOptions(final_only=not body.stream)
    if body.stream:
        output.heartbeat.FromNanoseconds(int(heartbeat * 1e9))
    return GenerationOptions(
        sampling=_sampling(body),
        min_tokens=body.min_tokens,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        include_stop=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        n=body.n,
        priority=body.priority or 0,
        cache_salt=(body.cache_salt or "").encode(),
        routing_key=body.prompt_cache_key or "",
        output=output,
        bad_words=body.bad_words,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _sampling(body: GenerationBody) -> SamplingParams:
    return SamplingParams(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        # OpenAI's seeds are signed.
        seed=None if body.seed is None else body.seed % 2**64,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=[LogitBias(token_id=i, bias=bias) for i, bias in (body.logit_bias or {}).items()],
        allowed_token_ids=body.allowed_token_ids,
        banned_token_ids=body.banned_token_ids,
        structured_output=_structured_output(body),
    )


def _structured_output(body: GenerationBody) -> StructuredOutput | None:
    if body.response_format and body.response_format.type == "json_object":
        return StructuredOutput(json_object=True)
    if body.response_format and body.response_format.json_schema:
        return StructuredOutput(json_schema=json.dumps(body.response_format.json_schema.schema_))
    wanted = body.structured_outputs
    if wanted is None:
        return None
    if wanted.choice is not None:
        return StructuredOutput(choice=Choice(choices=wanted.choice))
    return StructuredOutput(json_schema=wanted.json_, regex=wanted.regex, grammar=wanted.grammar)


def _structure_name(body: GenerationBody) -> dict[str, str]:
    """Which field of the body holds the constraint."""
    if body.response_format and body.response_format.json_schema:
        return {_STRUCTURE: "response_format.json_schema.schema"}
    if body.structured_outputs is None:
        return {_STRUCTURE: "response_format"}
    (name,) = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
    return {_STRUCTURE: f"structured_outputs.{name}"}


def _prompt(prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    return Prompt(tokens=TokenSequence(token_ids=prompt))


def _message(message: Message) -> ChatMessage:
    return ChatMessage(
        role=_ROLES[message.role],
        content="\n".join(part.content for part in message.content or ()),
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ],
        reasoning=message.reasoning_content,
    )


def _tools(body: ChatBody) -> list[Tool]:
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    return [
        Tool(
            name=tool.function.name,
            description=tool.function.description,
            parameters=json.dumps(tool.function.parameters) if tool.function.parameters is not None else None,
        )
        for tool in body.tools or ()
    ]


def _tool_choice(body: ChatBody) -> ToolChoice | None:
    wanted, is_single = body.tool_choice, body.parallel_tool_calls is False
    if wanted is None:
        return ToolChoice(single_call=True) if is_single else None
    if wanted.function is not None:
        # With OpenAI, a name means exactly one call, and clients count on that.
        return ToolChoice(mode=_MODES["required"], names=[wanted.function.name], single_call=True)
    if wanted.allowed_tools is not None:
        names = [tool.function.name for tool in wanted.allowed_tools.tools]
        return ToolChoice(mode=_MODES[wanted.allowed_tools.mode], names=names, single_call=is_single)
    return ToolChoice(mode=_MODES[wanted.type], single_call=is_single)


def _template_arguments(body: ChatBody) -> Struct:
    values: dict[str, Any] = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    arguments = Struct()
    try:
        arguments.update({**values, **(body.chat_template_kwargs or {})})
    except OverflowError as error:
        raise InvalidArgumentError.of("template_arguments", f"has a number that is too large: {error}") from error
    return arguments
