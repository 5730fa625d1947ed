"""Bad requests: a clear status naming the field; the router goes on serving; nothing stays open."""

import asyncio
import socket

import grpc
import pytest

from fissile.v1 import (
    ChatMessage,
    ChatRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    GenerationOptions,
    SamplingParams,
    TokenSequence,
)
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts, says

INVALID = grpc.StatusCode.INVALID_ARGUMENT
USER = ChatMessage(role=2, content="hello")


def refusal(*requests, **settings):
    """Errors of bad requests to one router, which then still answers a good one; no worker saw the bad ones."""
    worker = FakeWorker(says("ok"), max_model_len=64)

    async def scenario(system):
        errors = [await error_of(send(system, request)) for request in requests]
        assert (await system.ask(GenerateRequest(text="good"))).text == "ok"
        await system.quiet()
        return errors

    errors = run_system(scenario, worker, **settings)
    assert len(worker.received) == 1
    return errors


async def send(system, request):
    method = system.stub.Chat if isinstance(request, ChatRequest) else system.stub.Generate
    return await collect(method(request, timeout=20))


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (GenerateRequest(), ["text"]),
        (GenerateRequest(text=""), ["text"]),
        (GenerateRequest(text="", add_special_tokens=False), ["text"]),
        (GenerateRequest(tokens=TokenSequence()), ["tokens.token_ids"]),
        (GenerateRequest(tokens=TokenSequence(token_ids=[400])), ["tokens.token_ids[0]"]),
        (GenerateRequest(text="a", options=GenerationOptions(max_tokens=0)), ["options.max_tokens"]),
        (
            GenerateRequest(text="a", options=GenerationOptions(sampling=SamplingParams(top_p=2, temperature=-1))),
            ["options.sampling.temperature", "options.sampling.top_p"],
        ),
        (GenerateRequest(text="a", options=GenerationOptions(dp_rank=1)), ["options.dp_rank"]),
        (ChatRequest(), ["messages"]),
        (ChatRequest(messages=[USER], chat_template="{{ 1 }}"), ["chat_template"]),
        (ChatRequest(messages=[ChatMessage(role=4, content="x")]), ["messages"]),
    ],
)
def test_invalid_fields_are_named(request_, fields):
    (error,) = refusal(request_)
    assert (error.code, [v.field for v in error.violations]) == (INVALID, fields)


def test_a_prompt_that_leaves_no_room_names_both_numbers():
    """Case 9: L − 1, L, L + 1."""
    worker = FakeWorker(counts(10), max_model_len=64)

    def prompt(length):
        return GenerateRequest(tokens=TokenSequence(token_ids=[5] * length))

    async def scenario(system):
        fits = await system.ask(prompt(63))
        return fits, await error_of(system.ask(prompt(64))), await error_of(system.ask(prompt(65)))

    fits, equal, longer = run_system(scenario, worker)
    assert fits.usage.num_completion_tokens == 1
    assert (equal.code, longer.code) == (INVALID, INVALID)
    assert "the prompt has 64 tokens; the model's context of 64 leaves at most 63" in equal.message
    assert "65 tokens" in longer.message


def test_an_unknown_model_is_named():
    (error,) = refusal(GenerateRequest(model="other", text="a"))
    assert error.code == grpc.StatusCode.NOT_FOUND
    assert error.message == "model 'other' is not served here; there is toy"


def test_a_duplicate_request_id_is_refused_while_the_first_is_open():
    worker = FakeWorker(counts(500), step_seconds=0.005)

    async def scenario(system):
        first = system.stub.Generate(GenerateRequest(text="a", request_id="same"))
        await first.read()
        error = await error_of(system.ask(GenerateRequest(text="a", request_id="same")))
        first.cancel()
        await system.quiet()
        again = await system.ask(GenerateRequest(text="a", request_id="same", options=GenerationOptions(max_tokens=2)))
        return error, again

    error, again = run_system(scenario, worker)
    assert error.code == grpc.StatusCode.ALREADY_EXISTS
    assert again.usage.num_completion_tokens == 2


def test_a_huge_prompt_is_refused_before_tokenising_and_stalls_nobody():
    """10 MB: other streams go on while it arrives."""
    (error,) = refusal(GenerateRequest(text="word " * 2_000_000))
    assert error.code == INVALID
    assert "text: must have at most 4194304 bytes, has 10000000" in error.message


def test_more_open_requests_than_allowed_are_refused_with_retry_info():
    worker = FakeWorker(counts(500), step_seconds=0.005)

    async def scenario(system):
        calls = [system.stub.Generate(GenerateRequest(text="a")) for _ in range(2)]
        await until(lambda: len(worker.received) == 2)
        error = await error_of(system.ask(GenerateRequest(text="a")))
        for call in calls:
            call.cancel()
        await system.quiet()
        return error

    error = run_system(scenario, worker, max_open_requests=2)
    assert (error.code, error.retry_after) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)


def test_bytes_that_are_no_message_or_no_utf8_are_refused():
    salted = GenerateRequest(text="a", options=GenerationOptions(routing_key="XY")).SerializeToString()

    async def scenario(system):
        method = system.channel.unary_stream(
            "/fissile.v1.GenerationService/Generate",
            request_serializer=bytes,
            response_deserializer=GenerateResponse.FromString,
        )
        errors = []
        for raw in (b"\x1a\x02\xff\xfe", salted.replace(b"XY", b"\xff\xfe"), b"\xff" * 40):
            errors.append(await error_of(collect(method(raw, timeout=5))))
        assert (await system.ask(GenerateRequest(text="good"))).text == "ok"
        await system.quiet()
        return errors

    errors = run_system(scenario, FakeWorker(says("ok")))
    assert [e.code for e in errors] == [INVALID] * 3
    assert [e.message for e in errors] == [
        "text: must be UTF-8",
        "options.routing_key: must be UTF-8",
        "the request is not a valid fissile.v1.GenerateRequest",
    ]


def test_garbage_on_the_port_harms_nobody():
    async def scenario(system):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 1000, bytes(range(256)) * 100):
            with socket.create_connection(("127.0.0.1", system.port)) as connection:
                connection.sendall(garbage)
        await asyncio.sleep(0.05)
        return (await system.ask(GenerateRequest(text="good"))).text

    assert run_system(scenario, FakeWorker(says("ok"))) == "ok"


def test_detokenise_refuses_ids_beyond_the_vocabulary():
    async def scenario(system):
        return await error_of(system.stub.Detokenize(DetokenizeRequest(token_ids=[1, 400])))

    error = run_system(scenario, FakeWorker(says("ok")))
    assert [v.field for v in error.violations] == ["token_ids[1]"]
