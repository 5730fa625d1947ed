"""Protobuf answers from the router's own values. Most messages of a stream are one piece of text and nothing else, so
what is seldom there is set only where it is, and each part is made in its place."""

from typing import TypeVar

from fissile.v1 import ChatDelta, ChatResponse, CompletionDelta, GenerateResponse
from router.answering.completion import Delta
from router.answering.update import Update

M = TypeVar("M", CompletionDelta, ChatDelta)
R = TypeVar("R", GenerateResponse, ChatResponse)


def generate_response(request_id: str, update: Update) -> GenerateResponse:
    response = GenerateResponse(request_id=request_id)
    for delta in update.deltas:
        message = _filled(response.completions.add(index=delta.index, text=delta.text), delta)
        if delta.prompt_index:
            message.prompt_index = delta.prompt_index
    if update.prompt_logprobs:
        response.prompt_logprobs.extend(update.prompt_logprobs)
    return _with_rest(response, update)


def chat_response(request_id: str, update: Update) -> ChatResponse:
    response = ChatResponse(request_id=request_id)
    for delta in update.deltas:
        message = _filled(response.completions.add(index=delta.index, content=delta.text), delta)
        if delta.reasoning:
            message.reasoning = delta.reasoning
        if delta.tool_calls:
            message.tool_calls.extend(delta.tool_calls)
    return _with_rest(response, update)


def _filled(message: M, delta: Delta) -> M:
    if delta.token_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(delta.logprobs)
    if delta.finish:
        message.finish.CopyFrom(delta.finish)
    return message


def _with_rest(response: R, update: Update) -> R:
    if update.prompt_token_ids:
        response.prompt_token_ids.extend(update.prompt_token_ids)
    if update.usage and update.timings:
        response.usage.CopyFrom(update.usage)
        response.timings.CopyFrom(update.timings)
    return response
