"""Chat, the small RPCs, health, statistics, draining, discovery."""

import asyncio

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fissile.v1 import (
    ChatMessage,
    ChatRequest,
    DetokenizeRequest,
    FinishReason,
    GenerateRequest,
    GetModelRequest,
    GetStatsRequest,
    GetTokenizerResponse,
    ListModelsRequest,
    TokenizeRequest,
    Tool,
    ToolCall,
)
from router.asking.chat import render
from router.model import tokenizer
from router.model.chat_template import ChatTemplate
from router.model.tokenizer import receive_files
from tests.fakes import tokenizer as toys
from tests.fakes.ports import free_port
from tests.fakes.system import WAIT_SECONDS, collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts, says

USER, ASSISTANT, TOOL = 2, 3, 4
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def chat(*messages, **fields):
    return ChatRequest(messages=[ChatMessage(role=role, content=text) for role, text in messages], **fields)


def prompt_of(worker):
    return toys.byte_level().decode(worker.received[-1].token_ids, skip_special_tokens=False)


def test_chat_renders_the_template_and_streams_content():
    worker = FakeWorker(says(" Paris"))

    async def scenario(system):
        return await collect(system.stub.Chat(chat((USER, "Capital?"))))

    answer = run_system(scenario, worker)
    assert answer.text == " Paris"
    assert answer.finishes[0].reason == FinishReason.FINISH_REASON_EOS
    assert prompt_of(worker) == "<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\n"


def test_chat_continues_a_final_message():
    worker = FakeWorker(says("is"))

    async def scenario(system):
        request = chat((USER, "Capital?"), (ASSISTANT, "Paris"), continue_final_message=True)
        return await collect(system.stub.Chat(request))

    run_system(scenario, worker)
    assert prompt_of(worker) == "<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\nParis"


def test_a_template_of_the_request_where_allowed():
    worker = FakeWorker(says("x"))

    async def scenario(system):
        await collect(system.stub.Chat(chat((USER, "hi"), chat_template="{{ messages[0].content }}!")))
        return await error_of(collect(system.stub.Chat(chat((USER, "hi"), chat_template="{{ broken"))))

    error = run_system(scenario, worker, allow_chat_template=True)
    assert prompt_of(worker) == "hi!"
    assert [v.field for v in error.violations] == ["chat_template"]


def test_a_template_cannot_reach_out_of_its_sandbox():
    template = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(Exception, match="unsafe"):
        render(ChatTemplate("x"), chat((USER, "hi"), chat_template=template))


def test_tools_calls_and_arguments_reach_the_template():
    template = ChatTemplate(
        "plain",
        "{{ tools[0].function.name }} {{ messages[0].tool_calls[0].function.arguments.x + k }} {{ bos_token }}",
        {"bos_token": "B"},
    )
    arguments = Struct()
    arguments.update({"k": 2})
    call = ToolCall(id="1", name="f", arguments='{"x": 1}')
    request = ChatRequest(
        messages=[ChatMessage(role=ASSISTANT, tool_calls=[call])],
        tools=[Tool(name="f", parameters='{"type": "object"}')],
        template_arguments=arguments,
    )
    assert render(template, request) == "f 3 B"


def test_arguments_that_are_no_json_object_are_refused_by_path():
    call = ToolCall(id="1", name="f", arguments="[1")
    request = ChatRequest(messages=[ChatMessage(role=ASSISTANT, tool_calls=[call])])
    with pytest.raises(Exception, match=r"messages\[0\].tool_calls\[0\].arguments"):
        render(ChatTemplate("x"), request)


def test_tokenise_and_back():
    text = "naïve 😀"

    async def scenario(system):
        plain = await system.stub.Tokenize(TokenizeRequest(text=text, add_special_tokens=False))
        special = await system.stub.Tokenize(TokenizeRequest(text=text))
        kept = await system.stub.Detokenize(DetokenizeRequest(token_ids=special.token_ids, skip_special_tokens=False))
        skipped = await system.stub.Detokenize(DetokenizeRequest(token_ids=special.token_ids))
        return plain, special, kept.text, skipped.text

    plain, special, kept, skipped = run_system(scenario, FakeWorker(says("x")))
    assert b"".join(plain.tokens).decode() == text
    assert list(special.token_ids) == [0, *plain.token_ids]
    assert (kept, skipped) == ("<|bos|>" + text, text)


def test_models():
    a = FakeWorker(says("x"), model="a", files=toys.files(toys.byte_level(), temperature=0.5))
    others = [FakeWorker(says("x"), model="b") for _ in range(2)]

    async def scenario(system):
        listed = await system.stub.ListModels(ListModelsRequest())
        one = await system.stub.GetModel(GetModelRequest(model="a"))
        error = await error_of(system.ask(GenerateRequest(text="x")))
        await system.ask(GenerateRequest(model="a", text="x"))
        return listed.models, one.model, error

    listed, one, error = run_system(scenario, a, *others)
    assert [(m.id, m.num_workers) for m in listed] == [("a", 1), ("b", 2)]
    assert (one.max_model_len, one.vocab_size, list(one.eos_token_ids), one.has_chat_template) == (1024, 400, [2], True)
    assert (one.default_sampling.temperature, one.default_sampling.top_p) == (0.5, 1.0)
    assert one.tokenizer_fingerprint == toys.fingerprint(a.files)
    assert error.message == "model: must be one of a, b"
    assert len(a.received) == 1


def test_statistics_count_what_happened():
    workers = [FakeWorker(counts(5), dp_rank=rank, dp_size=2) for rank in range(2)]

    async def scenario(system):
        for _ in range(4):
            await system.ask(GenerateRequest(text="hello", add_special_tokens=False))
        await error_of(system.ask(GenerateRequest(text="")))
        await system.quiet()
        return await system.stub.GetStats(GetStatsRequest())

    stats = run_system(scenario, *workers)
    prompt = len(workers[0].received[0].token_ids)
    assert {f.reason: f.count for f in stats.finished} == {"length": 4, "invalid_argument": 1}
    assert (stats.num_completion_tokens, stats.num_prompt_tokens, stats.num_open_requests) == (20, 4 * prompt, 0)
    assert (stats.ttft.count, stats.tpot.count, stats.e2e.count, stats.itl.count) == (4, 4, 4, 16)
    assert 0 < stats.ttft.p50 <= stats.ttft.p99 <= stats.ttft.max
    assert [w.healthy for w in stats.workers] == [True, True]
    assert {w.dp_rank: w.ttft.count for w in stats.workers} == {0: 2, 1: 2}
    assert all(w.epoch.startswith("epoch-") for w in stats.workers)


def test_a_pinned_rank_is_used():
    workers = [FakeWorker(counts(5), dp_rank=rank, dp_size=2) for rank in range(2)]

    async def scenario(system):
        for _ in range(3):
            request = GenerateRequest(text="hello")
            request.options.dp_rank = 1
            await system.ask(request)

    run_system(scenario, *workers)
    assert [len(w.received) for w in workers] == [0, 3]


async def health(system):
    stub = health_pb2_grpc.HealthStub(system.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service="fissile.v1.GenerationService"))).status


async def wait_for_health(system, status):
    async with asyncio.timeout(WAIT_SECONDS):
        while await health(system) != status:
            await asyncio.sleep(0.01)


def test_health_follows_whether_a_request_would_succeed():
    """smg#1605. The router comes up before its worker, and survives it."""
    worker = FakeWorker(says("ok"))

    async def scenario(system):
        assert await health(system) == NOT_SERVING
        worker.port = int(next(iter(system.router.parts.workers.links)).rpartition(":")[2])
        await worker.start(serving=False)
        await until(lambda: system.router.parts.workers.catalogue.models)
        assert await health(system) == NOT_SERVING
        await worker.service.set_serving(True)
        await wait_for_health(system, SERVING)
        text = (await system.ask(GenerateRequest(text="a"))).text
        await worker.kill()
        await wait_for_health(system, NOT_SERVING)
        return text

    assert run_system(scenario, workers=[f"127.0.0.1:{free_port()}"], wait_ready=False) == "ok"


def test_no_worker_at_all_is_unavailable_after_a_bounded_wait():
    async def scenario(system):
        return await error_of(system.ask(GenerateRequest(text="a")))

    error = run_system(scenario, workers=[f"127.0.0.1:{free_port()}"], wait_ready=False, worker_wait=0.1)
    assert (error.code, error.message) == (grpc.StatusCode.UNAVAILABLE, "no worker has come within 0.1 s")


def test_shutdown_lets_open_requests_finish_and_takes_no_new_ones():
    worker = FakeWorker(counts(50), step_seconds=0.01)

    async def scenario(system):
        open_one = asyncio.create_task(system.ask(GenerateRequest(text="a")))
        await until(lambda: worker.received)
        closing = asyncio.create_task(system.router.parts.open_requests.close(10))
        await asyncio.sleep(0)
        refused = await error_of(system.ask(GenerateRequest(text="b")))
        answer = await open_one
        await closing
        return refused, answer

    refused, answer = run_system(scenario, worker)
    assert (refused.code, refused.message) == (grpc.StatusCode.UNAVAILABLE, "the router is shutting down")
    assert answer.usage.num_completion_tokens == 50


def test_shutdown_ends_what_does_not_finish_in_time():
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        call = system.stub.Generate(GenerateRequest(text="a"))
        await call.read()
        await system.router.parts.open_requests.close(0.05)
        error = await error_of(collect(call))
        await system.quiet()
        return error

    error = run_system(scenario, worker)
    assert (error.code, error.message) == (
        grpc.StatusCode.UNAVAILABLE,
        "the router shut down before the request was finished",
    )


def test_texts_to_tokenize_are_held_bytes_as_well():
    async def scenario(system):
        refused = [
            await error_of(system.stub.Tokenize(TokenizeRequest(text="a" * 20_000))),
            await error_of(system.stub.Detokenize(DetokenizeRequest(token_ids=[300] * 20_000))),
        ]
        answer = await system.stub.Tokenize(TokenizeRequest(text="abc"))
        return refused, len(answer.token_ids) > 0, system.router.parts.admission.held_bytes.num_taken

    refused, is_answered, num_held = run_system(scenario, FakeWorker(says("x")), max_held_bytes=10_000)
    assert all(error.code == grpc.StatusCode.RESOURCE_EXHAUSTED for error in refused)
    assert all("max-held-bytes" in error.message for error in refused)
    assert (is_answered, num_held) == (True, 0)


def test_a_damaged_tokenizer_file_is_refused():
    async def scenario(_):
        worker = FakeWorker(says("x"))

        async def damaged():
            async for part in worker.GetTokenizer(None, _NoContext()):
                part.data = part.data.replace(b"bos", b"BOS")
                yield part

        return await error_of_local(receive_files(damaged()))

    assert "arrived damaged: its SHA-256 does not match" in asyncio.run(scenario(None))


def test_files_of_a_tokenizer_are_bounded(monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_FILES_BYTES", 1000)
    num_parts = 0

    async def endless():
        nonlocal num_parts
        while True:
            num_parts += 1
            yield GetTokenizerResponse(name=f"{num_parts}.json", data=b"x" * 100)

    assert "more than 1000 bytes" in asyncio.run(error_of_local(receive_files(endless())))
    assert num_parts <= 10


async def error_of_local(call):
    try:
        await call
    except Exception as error:
        return str(error)
    raise AssertionError("expected an error")


class _NoContext:
    async def send_initial_metadata(self, metadata):
        pass


def test_refused_requests_are_counted():
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        call = system.stub.Generate(GenerateRequest(text="a", request_id="same"))
        await call.read()
        for request_id in ("same", "other"):
            await error_of(system.ask(GenerateRequest(text="a", request_id=request_id)))
        counted = dict(system.router.parts.metrics.finished)
        call.cancel()
        await system.quiet()
        return counted

    assert run_system(scenario, worker, max_open_requests=1) == {"already_exists": 1, "resource_exhausted": 1}
