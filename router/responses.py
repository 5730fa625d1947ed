"""Protobuf answers from the router's own values."""

from collections.abc import Iterable

from fissile.v1 import (
    ChatDelta,
    ChatResponse,
    CompletionDelta,
    FinishCount,
    GenerateResponse,
    GetStatsResponse,
    Model,
    WorkerStats,
)
from router.metrics import RouterMetrics
from router.request import Update
from router.worker_link import WorkerLink
from router.workers import ServedModel


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


def model_message(model: ServedModel) -> Model:
    return Model(
        id=model.id,
        architectures=model.info.architectures,
        max_model_len=model.info.max_model_len,
        vocab_size=model.info.vocab_size,
        tokenizer_fingerprint=model.info.tokenizer_fingerprint,
        has_chat_template=model.tokenizer.template is not None,
        eos_token_ids=model.info.eos_token_ids,
        default_sampling=model.tokenizer.default_sampling,
        num_workers=model.num_workers,
        aliases=model.aliases,
    )


def stats(
    metrics: RouterMetrics, links: Iterable[WorkerLink], num_open: int, window_seconds: float
) -> GetStatsResponse:
    latency = metrics.latency
    answer = GetStatsResponse(
        ttft=latency.ttft.quantiles(window_seconds),
        tpot=latency.tpot.quantiles(window_seconds),
        itl=latency.itl.quantiles(window_seconds),
        e2e=latency.e2e.quantiles(window_seconds),
        num_open_requests=num_open,
        finished=[FinishCount(reason=reason, count=count) for reason, count in sorted(metrics.finished.items())],
        num_prompt_tokens=metrics.num_prompt_tokens,
        num_completion_tokens=metrics.num_completion_tokens,
        workers=[_worker_stats(link, window_seconds) for link in sorted(links, key=lambda link: link.address)],
    )
    answer.uptime.FromNanoseconds(int(metrics.uptime * 1e9))
    return answer


def _worker_stats(link: WorkerLink, window_seconds: float) -> WorkerStats:
    return WorkerStats(
        address=link.address,
        healthy=link.is_available,
        detail=link.detail,
        epoch=link.info.epoch if link.info else "",
        num_open_requests=link.num_open_requests,
        load=link.load.last_report,
        ttft=link.latency.ttft.quantiles(window_seconds),
        tpot=link.latency.tpot.quantiles(window_seconds),
        dp_rank=link.info.dp_rank if link.info else 0,
    )
