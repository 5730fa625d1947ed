"""A GenerationService in this process that answers by rote, for tests of the client side only.

The completion of a text prompt is its words, one a message; the prompt chooses what else happens:
"slow" words come until the call is cancelled, "fail" ends with a typed error, "cut" ends without a finish reason.
With several prompts each has its words in one message. A chat with tools thinks and calls the first one;
one that ends with "think" thinks before it answers.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from google.protobuf import duration_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fissile import v1
from fissile.channel import SERVER_OPTIONS
from fissile.errors import (
    STATUS_DETAILS_KEY,
    InvalidArgumentError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from fissile.tls import ServerTls


def seconds(value: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(value * 1e9))
    return duration


class FakeService(v1.GenerationServiceServicer):
    def __init__(self) -> None:
        self.requests: list = []
        self.cancelled = threading.Event()
        self.num_answered: int | None = None
        """Requests after so many never end."""
        self.num_stats = 0
        """Times that it was asked for statistics; its counters grow with them."""

    def Generate(self, request, context) -> Iterator[v1.GenerateResponse]:
        self.requests.append(request)
        request_id = request.request_id or "made-by-router"
        words = request.text.split() or [str(t) for t in request.tokens.token_ids]
        if words == ["fail"]:
            abort(context, InvalidArgumentError.of("options.sampling.top_p", "must be in (0, 1], is 2"))
        if request.model not in ("", "fake"):
            abort(context, NotFoundError(f"model {request.model!r} is not served here"))
        if words == ["slow"] or len(self.requests) - 1 == self.num_answered:
            context.add_callback(self.cancelled.set)
            while not self.cancelled.is_set():
                yield delta(request_id, 0, "slow ", 1)
                self.cancelled.wait(0.01)
            return
        if request.prompts:
            for index, prompt in enumerate(request.prompts):
                finish = v1.Finish(reason=v1.FINISH_REASON_EOS)
                completion = v1.CompletionDelta(prompt_index=index, text=prompt.text, finish=finish)
                yield v1.GenerateResponse(completions=[completion])
            yield v1.GenerateResponse(usage=v1.Usage(num_prompt_tokens=len(request.prompts)))
            return
        n = request.options.n or 1
        if request.options.sampling.HasField("num_prompt_logprobs"):
            for token_id in (9, 8):  # in parts, as those of a long prompt
                yield v1.GenerateResponse(prompt_logprobs=[logprobs(token_id, 0)])
        cumulative = request.options.output.cumulative
        num_logprobs = request.options.sampling.num_logprobs
        for position, word in enumerate(words):
            text = word if position == 0 else " " + word
            if cumulative:
                text = " ".join(words[: position + 1])
            for index in range(n):
                message = delta(request_id, index, text, position)
                if request.options.sampling.HasField("num_logprobs"):
                    message.completions[0].logprobs.append(logprobs(position, num_logprobs))
                yield message
        if words == ["cut"]:
            return
        if cumulative:
            yield v1.GenerateResponse(completions=[v1.CompletionDelta(text=request.text, finish=v1.Finish(reason=1))])
            return
        yield last(request_id, n, len(words))

    def Chat(self, request, context) -> Iterator[v1.ChatResponse]:
        self.requests.append(request)
        if request.tools:
            yield from call_of(request.tools[0])
            return
        answer = f"{len(request.messages)} messages"
        if request.messages[-1].content == "think":
            yield v1.ChatResponse(completions=[v1.ChatDelta(reasoning="well")])
        for part in answer.split(" "):
            yield v1.ChatResponse(completions=[v1.ChatDelta(content=part, token_ids=[1])])
        finish = v1.Finish(reason=v1.FINISH_REASON_EOS, stop_token_id=2)
        yield v1.ChatResponse(
            completions=[v1.ChatDelta(finish=finish)],
            usage=v1.Usage(num_prompt_tokens=5, num_completion_tokens=3),
            timings=v1.RequestTimings(ttft=seconds(0.5), tpot=seconds(0.25), e2e=seconds(1.0)),
        )

    def Tokenize(self, request, context) -> v1.TokenizeResponse:
        raw = request.text.encode()
        return v1.TokenizeResponse(token_ids=list(raw), tokens=[bytes([b]) for b in raw])

    def Detokenize(self, request, context) -> v1.DetokenizeResponse:
        return v1.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def ListModels(self, request, context) -> v1.ListModelsResponse:
        model = v1.Model(
            id="fake",
            architectures=["FakeForCausalLM"],
            max_model_len=128,
            vocab_size=256,
            has_chat_template=True,
            eos_token_ids=[2],
            num_workers=1,
            default_sampling=v1.SamplingParams(
                temperature=0.5,
                top_k=20,
                bad_token_sequences=[v1.TokenSequence(token_ids=[3, 4])],
                logit_bias=[v1.LogitBias(token_id=5, bias=-1)],
            ),
            default_stop=["###"],
        )
        for name, weights in (("", "a" * 16), ("canary", "b" * 16)):
            version = model.versions.add(name=name, tokenizer_fingerprint="c" * 16, model_fingerprint=weights)
            version.dtype, version.max_model_len, version.num_workers = "float32", 128, 1
        return v1.ListModelsResponse(models=[model])

    def GetStats(self, request, context) -> v1.GetStatsResponse:
        self.num_stats += 1
        load = v1.WorkerLoad(
            num_running=3,
            num_waiting=4,
            num_blocks=10,
            num_used_blocks=5,
            num_generated_tokens=6 + 100 * self.num_stats,
            num_prefix_queries=40 * self.num_stats,
            num_prefix_hits=10 * self.num_stats,
            num_draft_tokens=20,
            num_accepted_tokens=15,
        )
        return v1.GetStatsResponse(
            ttft=v1.LatencyQuantiles(count=2, mean=0.5, p50=0.5, p90=0.9, p95=0.95, p99=0.99, max=1.0),
            num_open_requests=1,
            finished=[v1.FinishCount(reason="eos", count=7)],
            workers=[
                v1.WorkerStats(
                    address="127.0.0.1:50061",
                    healthy=True,
                    num_open_requests=1,
                    load=load,
                    model="fake",
                    ttft=v1.LatencyQuantiles(count=2, p50=0.5, p99=0.99),
                ),
                v1.WorkerStats(address="127.0.0.1:50062", detail="connection refused"),
            ],
            uptime=seconds(3),
        )


class Unavailable(FakeService):
    """Says UNAVAILABLE to all calls; a stream after a first message, if that is asked for."""

    def __init__(self, after_first=False):
        super().__init__()
        self.after_first = after_first

    def Generate(self, request, context):
        self.requests.append(request)
        if self.after_first:
            yield delta("r", 0, "one", 0)
        abort(context, UnavailableError("draining"))

    def ListModels(self, request, context):
        abort(context, UnavailableError("draining"))


class Silent(FakeService):
    """As a router that is stopped: it takes calls and says nothing, until `cancelled`."""

    def Generate(self, request, context):
        self.requests.append(request)
        self.cancelled.wait(20)
        yield from ()


def abort(context, error) -> None:
    context.set_trailing_metadata(((STATUS_DETAILS_KEY, error.to_status().SerializeToString()),))
    context.abort(error.code, error.message)


def delta(request_id: str, index: int, text: str, token_id: int) -> v1.GenerateResponse:
    completion = v1.CompletionDelta(index=index, text=text, token_ids=[token_id])
    return v1.GenerateResponse(request_id=request_id, completions=[completion])


def logprobs(token_id: int, num_likely: int) -> v1.TokenLogprobs:
    likely = [v1.TokenLogprob(token_id=90 + i, logprob=-1.0 - i, rank=1 + i, text=b"l") for i in range(num_likely)]
    return v1.TokenLogprobs(logprobs=[v1.TokenLogprob(token_id=token_id, logprob=-2.0, rank=3, text=b"\xff"), *likely])


def call_of(tool: v1.Tool) -> Iterator[v1.ChatResponse]:
    """Two calls of the tool, the second in one part."""
    parts = [
        v1.ChatDelta(reasoning="let me "),
        v1.ChatDelta(reasoning="see"),
        v1.ChatDelta(tool_calls=[v1.ToolCallDelta(id="call_0", name=tool.name, arguments='{"x":')]),
        v1.ChatDelta(
            tool_calls=[
                v1.ToolCallDelta(arguments=" 1}"),
                v1.ToolCallDelta(index=1, id="call_1", name=tool.name, arguments="{}"),
            ]
        ),
        v1.ChatDelta(finish=v1.Finish(reason=v1.FINISH_REASON_EOS)),
    ]
    for part in parts:
        yield v1.ChatResponse(completions=[part])
    yield v1.ChatResponse(usage=v1.Usage(num_completion_tokens=9, num_reasoning_tokens=4))


def last(request_id: str, n: int, num_words: int) -> v1.GenerateResponse:
    finish = v1.Finish(reason=v1.FINISH_REASON_STOP_STRING, stop=".")
    return v1.GenerateResponse(
        request_id=request_id,
        completions=[v1.CompletionDelta(index=index, finish=finish) for index in range(n)],
        usage=v1.Usage(num_prompt_tokens=num_words, num_completion_tokens=n * num_words, num_cached_tokens=1),
        timings=v1.RequestTimings(ttft=seconds(0.25), e2e=seconds(1.5)),
    )


class WantsKey(grpc.ServerInterceptor):
    """Refuses calls without the key, as the router does."""

    def __init__(self, key: str) -> None:
        self._expected = ("authorization", f"Bearer {key}")

    def intercept_service(self, continuation, handler_call_details):
        if self._expected in map(tuple, handler_call_details.invocation_metadata):
            return continuation(handler_call_details)
        error = UnauthenticatedError("authorization: a valid API key is needed")
        return grpc.stream_stream_rpc_method_handler(lambda _requests, context: abort(context, error))


@contextmanager
def serve(
    service: FakeService,
    tls: ServerTls | None = None,
    api_key: str = "",
    options: Sequence[tuple[str, int]] = (),
) -> Iterator[str]:
    """Serve on a free port of localhost; yields the address."""
    interceptors = [WantsKey(api_key)] if api_key else []
    server = grpc.server(ThreadPoolExecutor(8), interceptors=interceptors, options=[*SERVER_OPTIONS, *options])
    v1.add_GenerationServiceServicer_to_server(service, server)
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if tls is None:
        port = server.add_insecure_port("localhost:0")
    else:
        port = server.add_secure_port("localhost:0", tls.credentials())
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        service.cancelled.set()
        server.stop(0).wait()
