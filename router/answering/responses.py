"""Protobuf answers from the router's own values."""

from fissile.v1 import (
    ChatDelta,
    ChatResponse,
    CompletionDelta,
    GenerateResponse,
)
from router.answering.update import Update


def generate_response(request_id: str, update: Update) -> GenerateResponse:
    deltas = [
        CompletionDelta(
            index=d.index,
            text=d.text,
            token_ids=d.token_ids,
            logprobs=d.logprobs,
            finish=d.finish,
            prompt_index=d.prompt_index,
        )
        for d in update.deltas
    ]
    return GenerateResponse(
        request_id=request_id,
        completions=deltas,
        usage=update.usage,
        timings=update.timings,
        prompt_token_ids=update.prompt_token_ids,
        prompt_logprobs=update.prompt_logprobs,
    )


def chat_response(request_id: str, update: Update) -> ChatResponse:
    deltas = [
        ChatDelta(
            index=d.index,
            content=d.text,
            reasoning=d.reasoning,
            tool_calls=d.tool_calls,
            token_ids=d.token_ids,
            logprobs=d.logprobs,
            finish=d.finish,
        )
        for d in update.deltas
    ]
    return ChatResponse(
        request_id=request_id,
        completions=deltas,
        usage=update.usage,
        timings=update.timings,
        prompt_token_ids=update.prompt_token_ids,
    )
