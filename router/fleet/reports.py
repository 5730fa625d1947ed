"""What clients are told of models, workers and this router, as messages of the contract."""

from collections.abc import Awaitable, Callable, Iterable

from fissile.v1 import FinishCount, GetStatsResponse, Model, ModelVersion, WorkerStats
from router.fleet.link import WorkerLink
from router.metrics import RouterMetrics
from router.model.served import ServedModel, ServedVersion


def model(served: ServedModel) -> Model:
    main = served.main
    return Model(
        id=served.id,
        architectures=main.info.architectures,
        max_model_len=served.max_model_len,
        vocab_size=main.info.vocab_size,
        tokenizer_fingerprint=main.info.tokenizer_fingerprint,
        has_chat_template=main.tokenizer.template is not None,
        eos_token_ids=main.info.eos_token_ids,
        default_sampling=main.tokenizer.defaults.sampling,
        default_stop=main.tokenizer.defaults.stop,
        default_min_tokens=main.tokenizer.defaults.min_tokens,
        num_workers=served.num_workers,
        aliases=served.aliases,
        versions=[_version(one) for one in served.versions],
    )


def _version(served: ServedVersion) -> ModelVersion:
    version = served.version
    return ModelVersion(
        name=version.name,
        tokenizer_fingerprint=version.tokenizer_fingerprint,
        model_fingerprint=version.model_fingerprint,
        dtype=version.dtype,
        max_model_len=version.max_model_len,
        vocab_size=version.vocab_size,
        has_chat_template=served.tokenizer.template is not None,
        num_workers=served.num_workers,
    )


async def stats(
    metrics: RouterMetrics,
    links: Iterable[WorkerLink],
    num_open: int,
    num_queued: int,
    window_seconds: float,
    turn: Callable[[], Awaitable[None]],
) -> GetStatsResponse:
    """Of workers there may be hundreds, and of calls as well: each worker is looked at in a `turn` of the loop that has
    room for it."""
    await turn()
    latency = metrics.latency
    answer = GetStatsResponse(
        ttft=latency.ttft.quantiles(window_seconds),
        tpot=latency.tpot.quantiles(window_seconds),
        itl=latency.itl.quantiles(window_seconds),
        e2e=latency.e2e.quantiles(window_seconds),
        num_open_requests=num_open,
        num_queued_requests=num_queued,
        finished=[FinishCount(reason=reason, count=count) for reason, count in sorted(metrics.finished.items())],
        num_prompt_tokens=metrics.num_prompt_tokens,
        num_completion_tokens=metrics.num_completion_tokens,
    )
    answer.uptime.FromNanoseconds(int(metrics.uptime * 1e9))
    for link in sorted(links, key=lambda link: link.address):
        await turn()
        answer.workers.append(_worker_stats(link, window_seconds))
    return answer


def _worker_stats(link: WorkerLink, window_seconds: float) -> WorkerStats:
    return WorkerStats(
        address=link.address,
        healthy=link.is_available,
        detail=_detail(link),
        epoch=link.info.epoch if link.info else "",
        num_open_requests=link.num_open_requests,
        load=link.load.last_report,
        ttft=link.latency.ttft.quantiles(window_seconds),
        tpot=link.latency.tpot.quantiles(window_seconds),
        dp_rank=link.info.dp_rank if link.info else 0,
        model=link.info.model if link.info else "",
        model_version=link.info.model_version if link.info else "",
    )


def _detail(link: WorkerLink) -> str:
    if link.is_retired:
        return "gone from where workers are found; it finishes what it has"
    if link.is_ending:
        return link.detail or "a worker that it steps together with is lost"
    return link.detail or link.breaker.detail
