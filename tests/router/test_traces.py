"""One trace from a client through router and worker, into memory."""

import asyncio
import logging
import sys
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.trace import SpanKind, StatusCode

from common.tracers import tracer_of
from common.tracing import NoTracer, valid_traceparent
from fissile import AsyncClient
from fissile.errors import UnavailableError
from fissile.v1 import (
    ChatMessage,
    ChatRequest,
    ChatRole,
    FinishReason,
    GenerateRequest,
    GetStatsRequest,
    RequestOutput,
    WorkerLoad,
)
from router.config import RouterSettings
from router.server import RouterServer
from tests.fakes import tokenizer as toys
from tests.fakes.spans import ENDPOINT, spans_in_memory
from tests.fakes.system import QUICK, collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts, says
from tests.router.http.front import run_front
from tests.worker.harness import run_worker
from worker.face.served_files import ServedFiles
from worker.loader.tokenizer import TokenizerFiles

TEMPLATE = "{{ raise_exception(messages[0].content) }}"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADER = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def spans(monkeypatch):
    return spans_in_memory(monkeypatch)


def run_both(scenario, **router_settings):
    """`scenario(client)` with a router over a real worker without a model."""

    async def with_router(worker):
        router = RouterServer(
            RouterSettings(**QUICK, workers=[worker.address], otlp_traces_endpoint=ENDPOINT, **router_settings)
        )
        port = await router.start()
        try:
            await until(lambda: router.is_ready)
            async with AsyncClient(f"127.0.0.1:{port}") as client:
                return await scenario(client)
        finally:
            await router.stop()

    files = ServedFiles(TokenizerFiles(toys.files(toys.byte_level())), model_fingerprint="f1")
    return run_worker(with_router, files=files, otlp_traces_endpoint=ENDPOINT, served_model_name=["toy"])


def test_one_trace_from_the_client_to_the_steps(spans):
    async def scenario(client):
        with spans.provider("app").get_tracer("app").start_as_current_span("ask"):
            return await client.generate("a", max_tokens=5, ignore_eos=True, request_id="mine").result()

    run_both(scenario)
    assert spans.tree() == [
        ("ask", None),
        ("decode", "sequence"),
        ("dispatch", "text_completion toy"),
        ("prefill", "sequence"),
        ("queue", "sequence"),
        ("sequence", "dispatch"),
        ("text_completion toy", "ask"),
        ("tokenise", "text_completion toy"),
        ("wait for turn", "text_completion toy"),
    ]
    assert len({span.context.trace_id for span in spans.all}) == 1
    services = {span.name: span.resource.attributes["service.name"] for span in spans.all}
    assert (services["dispatch"], services["sequence"]) == ("fissile-router", "fissile-worker")
    kinds = [spans[name].kind for name in ("text_completion toy", "dispatch", "sequence", "decode")]
    assert kinds == [SpanKind.SERVER, SpanKind.CLIENT, SpanKind.SERVER, SpanKind.INTERNAL]
    request = dict(spans["text_completion toy"].attributes)
    assert 0 < request.pop("gen_ai.response.time_to_first_chunk") < 60
    assert request == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "",
        "gen_ai.response.model": "toy",
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    sequence = spans["sequence"].attributes
    assert (sequence["gen_ai.response.model"], sequence["gen_ai.usage.output_tokens"]) == ("toy", 5)
    prefill, decode = spans["prefill"], spans["decode"]
    assert (prefill.attributes["fissile.num_steps"], decode.attributes["fissile.num_steps"]) == (1, 4)
    assert [event.attributes["tokens"] for event in (*prefill.events, *decode.events)] == [2, 1, 1, 1, 1]
    for span in spans.all:
        if (parent := spans.parent_of(span)) is not None:
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time, span.name


def test_a_request_that_no_worker_takes(spans):
    refusal = RequestOutput(finish_reason=FinishReason.FINISH_REASON_ERROR, error_code=14, detail="draining")

    async def scenario(system):
        await error_of(collect(system.stub.Generate(GenerateRequest(text="a"))))

    run_system(scenario, FakeWorker(says("b"), refuse=refusal), otlp_traces_endpoint=ENDPOINT)
    request = spans["text_completion toy"]
    assert spans.tree() == [
        ("dispatch", "text_completion toy"),
        ("find worker", "text_completion toy"),
        ("text_completion toy", None),
        ("tokenise", "text_completion toy"),
        ("wait for turn", "text_completion toy"),
    ]
    assert [event.name for event in request.events] == ["lost by its worker"]
    assert request.attributes["error.type"] == "unavailable"
    assert [spans[name].status.status_code for name in (request.name, "dispatch", "tokenise")] == [
        StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET,
    ]  # fmt: skip
    assert spans["dispatch"].status.description == "refused: draining"


def test_a_request_that_waits_for_room(spans):
    worker = FakeWorker(says("b"), others=WorkerLoad(num_waiting=10**6))

    async def scenario(system):
        (link,) = system.router.parts.workers.links.values()
        await until(lambda: not link.load.has_room)
        call = system.stub.Generate(GenerateRequest(text="a"))
        await until(lambda: len(system.router.parts.admission.queue) == 1)
        gone = system.stub.Generate(GenerateRequest(text="a"))
        await until(lambda: len(system.router.parts.admission.queue) == 2)
        queued = (await system.stub.GetStats(GetStatsRequest())).num_queued_requests
        gone.cancel()
        await until(lambda: spans.all)
        worker.others = WorkerLoad()
        await collect(call)
        return queued

    assert run_system(scenario, worker, otlp_traces_endpoint=ENDPOINT) == 2
    waits = sorted(
        (span.status.description or "", spans.parent_of(span).name) for span in spans.all if span.name == "queue"
    )
    assert waits == [("", "text_completion toy"), ("it came to no worker", "text_completion toy")]


def test_what_is_the_clients_fault_is_no_error_of_the_router(spans):
    async def scenario(system):
        await error_of(collect(system.stub.Generate(GenerateRequest(text=""))))

    run_system(scenario, FakeWorker(says("b")), otlp_traces_endpoint=ENDPOINT)
    request = spans["text_completion toy"]
    assert (request.attributes["error.type"], request.status.status_code) == ("invalid_argument", StatusCode.UNSET)


def test_a_router_that_does_not_trace_passes_the_trace_on(caplog):
    """From both fronts, and into its log; what is no traceparent costs nobody a request."""
    worker = FakeWorker(counts(2))

    async def scenario(client, system):
        body = {"prompt": "a"}
        await client.post("/v1/completions", json=body, headers={"traceparent": HEADER})
        await client.post("/v1/completions", json=body, headers={"traceparent": HEADER.upper()})
        await collect(system.stub.Generate(GenerateRequest(text="a"), metadata=(("traceparent", HEADER),)))
        await collect(system.stub.Generate(GenerateRequest(text="a")))

    with caplog.at_level(logging.INFO):
        run_front(scenario, worker)
    assert [group.traceparent for group in worker.groups] == [HEADER, "", HEADER, ""]
    lines = [record for record in caplog.records if record.name == "router.account"]
    assert [f" of trace {TRACE}: " in line.getMessage() for line in lines] == [True, False, True, False]
    assert lines[0].trace_id == TRACE


@pytest.mark.parametrize(
    ("header", "valid"),
    [
        (HEADER, HEADER),
        (f"cc-{HEADER[3:]}-of-the-future", HEADER),
        (f"{HEADER}-more", ""),
        (f"ff-{HEADER[3:]}", ""),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (HEADER[:-1], ""),
        ("\n", ""),
    ],
)
def test_a_header_is_taken_as_the_standard_says(header, valid):
    assert valid_traceparent(header) == valid


def test_it_is_off_without_an_endpoint():
    assert isinstance(tracer_of("router", ""), NoTracer)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "common.otel", None)
    with pytest.raises(UnavailableError, match=r"pip install 'fissile\[tracing\]'"):
        tracer_of("router", ENDPOINT)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """As a collector takes spans."""

    def __init__(self):
        self.names = []

    def Export(self, request, context):
        self.names += [
            span.name for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_a_collector_before_the_end():
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    async def scenario():
        tracer = tracer_of("router", f"http://127.0.0.1:{port}")
        with tracer.span("first", "") as first, tracer.span("second", first.traceparent):
            pass
        await tracer.close()

    try:
        asyncio.run(scenario())
    finally:
        server.stop(0)
    assert sorted(collector.names) == ["first", "second"]


def test_spans_hold_no_word_of_a_clients_prompt(spans):
    """Also where what failed quotes it."""

    async def scenario(system):
        secret = "the secret"
        await collect(system.stub.Generate(GenerateRequest(text=secret)))
        message = ChatMessage(role=ChatRole.CHAT_ROLE_USER, content=secret)
        await error_of(collect(system.stub.Chat(ChatRequest(messages=[message], chat_template=TEMPLATE))))

    run_system(scenario, FakeWorker(says("secret")), otlp_traces_endpoint=ENDPOINT, allow_chat_template=True)
    assert spans["chat toy"].attributes["error.type"] == "invalid_argument"
    assert "secret" not in "".join(span.to_json() for span in spans.all)
