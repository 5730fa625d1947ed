"""Bounds of gRPC connections. A misspelt option would be ignored in silence."""

import asyncio
from functools import partial

import grpc
import pytest

from fissile.channel import aio_channel
from fissile.v1 import GenerateRequest, GenerationOptions, GenerationServiceStub
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts

GENERATE = "/fissile.v1.GenerationService/Generate"


def test_connections_beyond_the_bound_are_closed():
    async def scenario(system):
        request = GenerateRequest(text="a")
        await system.ask(request)
        channels = [aio_channel(f"127.0.0.1:{system.port}") for _ in range(3)]
        calls = [GenerationServiceStub(channel).Generate(request) for channel in channels]
        answers = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        for channel in channels:
            await channel.close()
        return [answer.code() for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]

    assert run_system(scenario, FakeWorker(counts(2)), max_connections=2) == [grpc.StatusCode.UNAVAILABLE] * 2


def test_calls_beyond_those_of_a_connection_wait_and_none_is_refused():
    """gRPC's own protection would refuse some while calls that have ended are still to be freed."""
    most = 0

    async def scenario(system):
        async def again_and_again():
            nonlocal most
            for _ in range(10):
                answer = asyncio.create_task(system.ask(GenerateRequest(text="a")))
                await asyncio.sleep(0)
                most = max(most, len(system.router.parts.open_requests))
                assert (await answer).usage.num_completion_tokens == 2

        await asyncio.gather(*(again_and_again() for _ in range(24)))

    run_system(scenario, FakeWorker(counts(2), step_seconds=0.002), max_connection_calls=8)
    assert 1 < most <= 8


def test_a_connection_that_is_full_is_told_of(caplog):
    async def scenario(system):
        count = partial(system.router.parts.metrics.registry.get_sample_value, "fissile_router_full_connections_total")
        found = []
        for num_calls in (2, 3, 2, 3):
            await asyncio.gather(*(system.ask(GenerateRequest(text="a")) for _ in range(num_calls)))
            found.append(count())
        return found

    assert run_system(scenario, FakeWorker(counts(2), step_seconds=0.01), max_connection_calls=3) == [0, 1, 1, 2]
    lines = [record.message for record in caplog.records if "max-connection-calls" in record.message]
    assert lines == [
        "a connection of 127.0.0.1 has 3 calls open, all that it may (max-connection-calls): more would wait unseen in "
        "the client's gRPC; it can open another connection"
    ]


def test_calls_that_ended_badly_are_open_no_more():
    async def scenario(system):
        for _ in range(3):
            await error_of(system.ask(GenerateRequest(text="a", model="another")))
            call = system.stub.Generate(GenerateRequest(text="a"))
            await call.read()
            call.cancel()
            await until(lambda: not system.router.parts.open_requests)
        return system.router.parts.metrics.registry.get_sample_value("fissile_router_full_connections_total")

    assert run_system(scenario, FakeWorker(counts(2), step_seconds=0.01), max_connection_calls=3) == 0


def test_a_connection_with_all_its_calls_is_in_no_other_ones_way():
    """A client has a connection of its own, also beside another one of the same process."""

    async def scenario(system):
        calls = [system.stub.Generate(GenerateRequest(text="a")) for _ in range(8)]
        await until(lambda: len(system.router.parts.open_requests) == 4)
        async with aio_channel(f"127.0.0.1:{system.port}") as channel:
            options = GenerationOptions(max_tokens=3)
            answer = await collect(GenerationServiceStub(channel).Generate(GenerateRequest(text="a", options=options)))
        num_open = len(system.router.parts.open_requests)
        for call in calls:
            call.cancel()
        await system.quiet()
        return num_open, answer.usage.num_completion_tokens

    worker = FakeWorker(counts(2000), step_seconds=0.005, max_model_len=3000)
    assert run_system(scenario, worker, max_connection_calls=4) == (4, 3)


@pytest.mark.parametrize("grace", [0.2, 60.0])
def test_an_old_connection_takes_nothing_new_and_its_requests_have_some_time(grace):
    worker = FakeWorker(counts(60), step_seconds=0.01)

    async def scenario(system):
        if grace < 1:
            return (await error_of(system.ask(GenerateRequest(text="a")))).code
        return (await system.ask(GenerateRequest(text="a"))).usage.num_completion_tokens

    end = run_system(scenario, worker, max_connection_age=0.2, max_connection_age_grace=grace)
    assert end == (grpc.StatusCode.UNAVAILABLE if grace < 1 else 60)


def test_requests_that_do_not_come_are_given_up_and_wait_in_the_clients_own_line():
    """A client may open calls and say nothing: 32 are waited for at a time, and health is none of its business."""

    async def scenario(system):
        silent = [system.channel.stream_stream(GENERATE)() for _ in range(40)]
        ends = await asyncio.gather(*(error_of(call.read()) for call in silent))
        answer = await system.ask(GenerateRequest(text="a"))
        empty = system.channel.stream_stream(GENERATE)()
        await empty.done_writing()
        await system.quiet()
        return {end.message for end in ends}, answer.usage.num_completion_tokens, (await error_of(empty.read())).message

    messages, num_tokens, empty = run_system(scenario, FakeWorker(counts(2)), receive_timeout=0.2)
    assert messages == {"the request did not come within 0.2 s (receive-timeout)"}
    assert (num_tokens, empty) == (2, "the call ended without a request")
