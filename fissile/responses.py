"""From response messages to the dataclasses of `fissile.results`. Shared by both clients."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf import duration_pb2

from fissile.errors import InternalError
from fissile.results import (
    Completion,
    Delta,
    Finish,
    Generation,
    Logprob,
    Model,
    ModelVersion,
    Quantiles,
    Stats,
    Timings,
    Token,
    ToolCall,
    ToolCallDelta,
    Usage,
    Worker,
)
from fissile.v1 import generation_pb2, sampling_pb2, sequence_pb2

Response = generation_pb2.GenerateResponse | generation_pb2.ChatResponse
ProtoDelta = generation_pb2.CompletionDelta | generation_pb2.ChatDelta

_FINISH_PREFIX = "FINISH_REASON_"


@dataclass(slots=True)
class _Call:
    """A tool call that is being received."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, delta: ToolCallDelta) -> None:
        self.id = self.id or delta.id
        self.name = self.name or delta.name
        self.arguments.append(delta.arguments)


@dataclass(slots=True)
class _Parts:
    """A completion that is being received."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[Logprob, ...]] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.reasonings.append(delta.reasoning)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        for call in delta.tool_calls:
            self.calls.setdefault(call.index, _Call()).add(call)
        self.finish = delta.finish or self.finish


class Collector:
    """Adds up the messages of one stream. `add` each in order, then `generation`. `cumulative`: each message carries
    everything so far."""

    def __init__(self, *, cumulative: bool = False) -> None:
        self._cumulative = cumulative
        self._parts: dict[tuple[int, int], _Parts] = {}
        """By prompt and index."""
        self._usage = Usage()
        self._timings = Timings()
        self._prompt_token_ids: tuple[int, ...] = ()
        self._prompt_logprobs: tuple[tuple[Logprob, ...], ...] = ()
        self.request_id = ""

    def add(self, response: Response) -> list[Delta]:
        """Take one message; returns what is new in it."""
        self.request_id = response.request_id or self.request_id
        if response.HasField("usage"):
            self._usage = _usage(response.usage)
        if response.HasField("timings"):
            self._timings = _timings(response.timings)
        if response.prompt_token_ids:
            self._prompt_token_ids = tuple(response.prompt_token_ids)
        if isinstance(response, generation_pb2.GenerateResponse) and response.prompt_logprobs:
            self._prompt_logprobs += _logprobs(response.prompt_logprobs)
        deltas = [_delta(completion) for completion in response.completions]
        for delta in deltas:
            key = (delta.prompt_index, delta.index)
            if self._cumulative or key not in self._parts:
                self._parts[key] = _Parts()
            self._parts[key].add(delta)
        return deltas

    def generation(self) -> Generation:
        """The whole, after the stream ended. Raises InternalError if the server ended it without finishing every
        completion: a truncated answer must not look like a whole one."""
        if not self._parts:
            raise InternalError("the stream ended without a completion")
        return Generation(
            request_id=self.request_id,
            completions=tuple(_completion(*key, self._parts[key]) for key in sorted(self._parts)),
            usage=self._usage,
            timings=self._timings,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
        )


def _completion(prompt_index: int, index: int, parts: _Parts) -> Completion:
    if parts.finish is None:
        raise InternalError(f"the stream ended without a finish reason for completion {index} of prompt {prompt_index}")
    calls = [parts.calls[i] for i in sorted(parts.calls)]
    return Completion(
        index=index,
        text="".join(parts.texts),
        reasoning="".join(parts.reasonings),
        token_ids=tuple(parts.token_ids),
        logprobs=tuple(parts.logprobs),
        finish=parts.finish,
        tool_calls=tuple(ToolCall(call.id, call.name, "".join(call.arguments)) for call in calls),
        prompt_index=prompt_index,
    )


def _delta(message: ProtoDelta) -> Delta:
    if isinstance(message, generation_pb2.ChatDelta):
        calls = tuple(ToolCallDelta(c.index, c.id, c.name, c.arguments) for c in message.tool_calls)
        text, reasoning, prompt_index = message.content, message.reasoning, 0
    else:
        calls = ()
        text, reasoning, prompt_index = message.text, "", message.prompt_index
    return Delta(
        index=message.index,
        text=text,
        reasoning=reasoning,
        tool_calls=calls,
        prompt_index=prompt_index,
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        finish=_finish(message.finish) if message.HasField("finish") else None,
    )


def _finish(message: generation_pb2.Finish) -> Finish:
    return Finish(
        reason=sequence_pb2.FinishReason.Name(message.reason).removeprefix(_FINISH_PREFIX).lower(),
        stop=message.stop if message.HasField("stop") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        detail=message.detail,
        score=message.score if message.HasField("score") else None,
    )


def _logprobs(positions: Sequence[sampling_pb2.TokenLogprobs]) -> tuple[tuple[Logprob, ...], ...]:
    return tuple(
        tuple(Logprob(entry.token_id, entry.logprob, entry.rank, entry.text) for entry in position.logprobs)
        for position in positions
    )


def _usage(message: generation_pb2.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=message.num_prompt_tokens,
        num_completion_tokens=message.num_completion_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_reasoning_tokens=message.num_reasoning_tokens,
    )


def _timings(message: generation_pb2.RequestTimings) -> Timings:
    return Timings(
        ttft=_seconds(message.ttft) if message.HasField("ttft") else None,
        tpot=_seconds(message.tpot) if message.HasField("tpot") else None,
        e2e=_seconds(message.e2e) if message.HasField("e2e") else None,
        worker_queued=_seconds(message.worker_queued) if message.HasField("worker_queued") else None,
        max_itl=_seconds(message.max_itl) if message.HasField("max_itl") else None,
    )


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def tokens(message: generation_pb2.TokenizeResponse) -> tuple[Token, ...]:
    return tuple(Token(token_id, text) for token_id, text in zip(message.token_ids, message.tokens, strict=True))


def model(message: generation_pb2.Model) -> Model:
    return Model(
        id=message.id,
        architectures=tuple(message.architectures),
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        has_chat_template=message.has_chat_template,
        eos_token_ids=tuple(message.eos_token_ids),
        num_workers=message.num_workers,
        default_sampling=_defaults(message),
        aliases=tuple(message.aliases),
        versions=tuple(_version(version) for version in message.versions),
    )


def _defaults(message: generation_pb2.Model) -> dict[str, object]:
    """By option, in the form in which requests are given it."""
    sampling = message.default_sampling
    lists: dict[str, object] = {
        "logit_bias": {entry.token_id: entry.bias for entry in sampling.logit_bias},
        "banned_token_ids": tuple(sampling.banned_token_ids),
        "bad_token_sequences": tuple(tuple(bad.token_ids) for bad in sampling.bad_token_sequences),
        "stop": tuple(message.default_stop),
        "min_tokens": message.default_min_tokens,
    }
    found: dict[str, object] = {field.name: value for field, value in sampling.ListFields()}
    return found | {name: value for name, value in lists.items() if value}


def _version(message: generation_pb2.ModelVersion) -> ModelVersion:
    return ModelVersion(
        name=message.name,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        model_fingerprint=message.model_fingerprint,
        dtype=message.dtype,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        has_chat_template=message.has_chat_template,
        num_workers=message.num_workers,
    )


def stats(message: generation_pb2.GetStatsResponse) -> Stats:
    return Stats(
        ttft=_quantiles(message.ttft),
        tpot=_quantiles(message.tpot),
        itl=_quantiles(message.itl),
        e2e=_quantiles(message.e2e),
        num_open_requests=message.num_open_requests,
        finished={entry.reason: entry.count for entry in message.finished},
        num_prompt_tokens=message.num_prompt_tokens,
        num_completion_tokens=message.num_completion_tokens,
        workers=tuple(_worker(worker) for worker in message.workers),
        uptime=_seconds(message.uptime),
        num_queued_requests=message.num_queued_requests,
    )


def _quantiles(message: generation_pb2.LatencyQuantiles) -> Quantiles:
    return Quantiles(
        count=message.count,
        mean=message.mean,
        p50=message.p50,
        p90=message.p90,
        p95=message.p95,
        p99=message.p99,
        max=message.max,
    )


def _worker(message: generation_pb2.WorkerStats) -> Worker:
    return Worker(
        address=message.address,
        healthy=message.healthy,
        detail=message.detail,
        num_open_requests=message.num_open_requests,
        num_running=message.load.num_running,
        num_waiting=message.load.num_waiting,
        num_blocks=message.load.num_blocks,
        num_used_blocks=message.load.num_used_blocks,
        num_generated_tokens=message.load.num_generated_tokens,
        num_prefix_queries=message.load.num_prefix_queries,
        num_prefix_hits=message.load.num_prefix_hits,
        num_draft_tokens=message.load.num_draft_tokens,
        num_accepted_tokens=message.load.num_accepted_tokens,
        model=message.model,
        model_version=message.model_version,
        epoch=message.epoch,
        ttft=_quantiles(message.ttft),
        tpot=_quantiles(message.tpot),
    )
