"""Clients that ask for much and read nothing, over real sockets: each loses its request, and nobody else anything."""

import asyncio

import grpc

from fissile.channel import aio_channel
from fissile.v1 import GenerateRequest, GenerationOptions, GenerationServiceStub
from router.answering.update import MAX_ENTRIES
from tests.fakes.system import Answer, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts

LOGPROBS = {"sampling": {"num_logprobs": 64}}


def ask(**options):
    return GenerateRequest(text="a", options=GenerationOptions(ignore_eos=True, **LOGPROBS, **options))


async def stalled(stub, num_calls, request):
    """Calls that have read one message each, and read on no more."""
    calls = [stub.Generate(request) for _ in range(num_calls)]
    for call in calls:
        await call.read()
    return calls


def test_who_reads_nothing_loses_its_request_and_counts_as_a_place_until_it_goes():
    worker = FakeWorker(counts(20_000), step_seconds=0.001, tokens_per_step=20, max_model_len=30_000, mute_after=15_000)

    async def scenario(system):
        async with aio_channel(f"127.0.0.1:{system.port}") as channel:
            calls = await stalled(GenerationServiceStub(channel), 2, ask())
            await until(lambda: sum(system.router.parts.metrics.finished.values()) == 2)
            await until(lambda: not worker.running)
            ends = dict(system.router.parts.metrics.finished)
            lingering = len(system.router.parts.open_requests)
            answer = await system.ask(GenerateRequest(text="a", options=GenerationOptions(max_tokens=3)))
            status = await error_of(rest(calls[0]))
            calls[1].cancel()
        await system.quiet()
        return ends, lingering, answer, status

    ends, lingering, answer, error = run_system(scenario, worker, write_timeout=0.4, max_message_rate=1e9)
    assert ends == {"resource_exhausted": 2}
    assert lingering == 2
    assert answer.usage.num_completion_tokens == 3
    assert (error.code, error.message) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "nothing of the answer was read for 0.4 s (write-timeout)",
    )


async def rest(call):
    while await call.read() is not grpc.aio.EOF:
        pass


def test_what_waits_for_a_reader_is_bounded_in_bytes():
    """128 completions with 64 log probabilities each: 30 MB/s before there was a bound."""
    worker = FakeWorker(counts(1000), step_seconds=0.001, max_model_len=2000)

    async def scenario(system):
        (call,) = await stalled(system.stub, 1, ask(n=128))
        await until(lambda: not worker.running)
        error = await error_of(rest(call))
        await system.quiet()
        return error, system.router.parts.admission.held_bytes.num_taken

    error, held = run_system(scenario, worker, max_unread_bytes=2 * 1024 * 1024, max_message_rate=1e9)
    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max-unread-bytes" in error.message
    assert held == 0


def test_who_asks_for_the_end_only_is_bounded_too():
    worker = FakeWorker(counts(1000), step_seconds=0.0, max_model_len=2000)

    async def scenario(system):
        error = await error_of(system.ask(ask(n=16, output={"final_only": True})))
        await system.quiet()
        return error

    error = run_system(scenario, worker, max_held_bytes=4 * 1024 * 1024)
    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max-held-bytes" in error.message


def test_a_slow_reader_keeps_its_request_and_gets_all_of_it():
    """It takes something within the time-out, again and again; what waits meanwhile comes in parts."""
    worker = FakeWorker(counts(60), step_seconds=0.001, tokens_per_step=20, max_model_len=10_000)

    async def scenario(system):
        call, answer = system.stub.Generate(ask(n=16, output={"token_ids": True})), Answer()
        while (message := await call.read()) is not grpc.aio.EOF:
            answer.add(message)
            await asyncio.sleep(0.005)
        return answer

    answer = run_system(scenario, worker, write_timeout=0.4, max_message_rate=1e9)
    assert sorted(answer.tokens.values()) == sorted(counts(60)(sequence) for sequence in worker.received)
    assert {key: len(positions) for key, positions in answer.logprobs.items()} == dict.fromkeys(range(16), 60)
    entries = [sum(len(p.logprobs) for d in m.completions for p in d.logprobs) for m in answer.messages]
    assert MAX_ENTRIES / 2 < max(entries) <= MAX_ENTRIES


def test_who_leaves_the_last_message_unread_counts_as_a_place_until_it_is_read():
    """The request is over: its worker is free, and it ended well."""
    worker = FakeWorker(counts(50_000), step_seconds=0.0, tokens_per_step=5000, max_model_len=60_000)
    request = GenerateRequest(text="a", options={"ignore_eos": True, "output": {"token_ids": True, "final_only": True}})

    async def scenario(system):
        small = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{system.port}", small) as channel:
            call = GenerationServiceStub(channel).Generate(request)
            await until(lambda: sum(system.router.parts.metrics.finished.values()) == 1)
            await until(lambda: system.router.parts.admission.held_bytes.num_taken)
            lingering = len(system.router.parts.open_requests)
            held = system.router.parts.admission.held_bytes.num_taken
            messages = [message async for message in call]
        await system.quiet()
        left = len(system.router.parts.open_requests), system.router.parts.admission.held_bytes.num_taken
        return dict(system.router.parts.metrics.finished), lingering, held, messages, left

    ends, lingering, held, messages, left = run_system(scenario, worker, write_timeout=0.4)
    assert ends == {"length": 1}
    assert (lingering, held) == (1, messages[-1].ByteSize())
    assert messages[-1].usage.num_completion_tokens == 50_000
    assert left == (0, 0)
