"""However a sequence ends, it ends once, and nothing of it stays."""

import asyncio

import grpc
import pytest

from fissile.v1 import ExecuteCommand, ExecuteRequest, FinishReason, GetLoadRequest, WorkerServiceStub
from tests.worker.harness import Router, connect, expected, group, quiet, run_all, run_worker, sequence, until

ABORTED = FinishReason.FINISH_REASON_ABORTED
DEADLINE = FinishReason.FINISH_REASON_DEADLINE
LENGTH = FinishReason.FINISH_REASON_LENGTH


def test_abort_of_a_waiting_sequence():
    """Case 16: it was never scheduled and has no blocks."""

    async def scenario(system):
        system.executor.open.clear()
        router = connect(system)
        await router.send(sequence(1, max_tokens=8), sequence(2))
        await router.send(2)
        await router.send(sequence(3))
        await until(lambda: system.server._broker.num_open == 3)
        system.executor.open.set()
        await router.finish(1, 2, 3)
        await quiet(system)
        return router

    router = run_worker(scenario, max_num_seqs=1)
    assert (router.ended[2].finish_reason, router.tokens[2]) == (ABORTED, [])
    assert router.ended[1].finish_reason == LENGTH


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_abort_of_a_running_sequence(async_scheduling):
    message = sequence(1, max_tokens=1000)

    async def scenario(system):
        router = connect(system)
        await router.send(message)
        await router.read_tokens(1, 3)
        await router.send(1)
        await router.finish(1)
        await quiet(system)
        return router

    router = run_worker(scenario, max_model_len=2000, num_blocks=200, async_scheduling=async_scheduling)
    tokens = router.tokens[1]
    assert router.ended[1].finish_reason == ABORTED
    assert tokens == expected(message, len(tokens))


def test_abort_in_the_middle_of_a_chunked_prompt():
    """Case 16: blocks for a part of the prompt."""

    async def scenario(system):
        system.executor.open.clear()
        before = system.executor.num_submitted
        router = connect(system)
        await router.send(sequence(1, 48))
        await until(lambda: system.executor.num_submitted > before)
        await router.send(1, sequence(2))
        await until(lambda: system.server._broker.num_open == 2)
        system.executor.open.set()
        await router.finish(1, 2)
        await quiet(system)
        return router

    router = run_worker(scenario, scheduling_policy="chunked", max_prefill_chunk=16, async_scheduling=False)
    assert (router.ended[1].finish_reason, router.tokens[1]) == (ABORTED, [])


def test_abort_of_finished_and_unknown_sequences_does_nothing():
    """Case 16."""

    async def scenario(system):
        router = await run_all(system, sequence(1))
        await router.send(1, 999, 1)
        await router.send(sequence(2))
        await router.finish(2)
        return router

    router = run_worker(scenario)
    assert {id: output.finish_reason for id, output in router.ended.items()} == {1: LENGTH, 2: LENGTH}


def test_abort_in_the_message_of_the_sequence():
    async def scenario(system):
        return await run_all(system, sequence(1, max_tokens=1000), 1, 1)

    router = run_worker(scenario, max_model_len=2000, num_blocks=200)
    assert router.ended[1].finish_reason == ABORTED


@pytest.mark.parametrize("first", [1, 2])
def test_an_abort_in_a_group_ends_one_of_it(first):
    """Case 60, but that the first of a group is one like the others: a stop string ended it, which the router knows."""
    message = group(4, max_tokens=40)

    async def scenario(system):
        router = connect(system)
        await router.send(message)
        await router.read_tokens(4, 3)
        system.executor.open.clear()
        await router.send(first)
        system.executor.open.set()
        await router.finish(1, 2, 3, 4)
        await quiet(system)
        return router

    router = run_worker(scenario, async_scheduling=False)
    assert {id for id, output in router.ended.items() if output.finish_reason == ABORTED} <= {first}
    others = {1, 2, 3, 4} - {first}
    assert {id: router.tokens[id] for id in others} == {id: expected(message, 40, id - 1) for id in others}


def test_abort_racing_the_end_gives_one_end():
    """Case 17, over the wire: the abort is on its way when the last token comes."""

    async def scenario(system):
        router = connect(system)
        for id in range(1, 301):
            await router.send(sequence(id, max_tokens=2))
            await router.read_tokens(id, 1)
            await router.send(id)
            await router.finish(id)
        await quiet(system)
        return router

    router = run_worker(scenario)
    assert len(router.ended) == 300
    assert {output.finish_reason for output in router.ended.values()} <= {ABORTED, LENGTH}


def test_a_broken_stream_frees_everything_within_a_step():
    """Case 18: cancel after 3 tokens of 1,000."""

    async def scenario(system):
        router = connect(system)
        await router.send(sequence(1, max_tokens=1000), sequence(2, max_tokens=1000))
        await router.read_tokens(1, 3)
        # The engine stands still in a step: what the cancel does can be counted in steps.
        system.executor.open.clear()
        router.call.cancel()
        await until(lambda: system.server._broker.num_open == 0)
        step = system.server._engine.step
        system.executor.open.set()
        await quiet(system)
        return system.server._engine.step - step

    assert run_worker(scenario, max_model_len=2000, num_blocks=200) <= 2


def test_a_broken_stream_leaves_other_streams_alone():
    message = sequence(1, max_tokens=50)

    async def scenario(system):
        broken, other = connect(system), connect(system)
        await broken.send(sequence(1, max_tokens=50))
        await other.send(message)
        await broken.read_tokens(1, 1)
        broken.call.cancel()
        await other.finish(1)
        return other

    assert run_worker(scenario).tokens[1] == expected(message, 50)


def test_a_deadline_ends_a_running_sequence():
    message = sequence(1, max_tokens=100_000, deadline_ms=100)

    async def scenario(system):
        router = await run_all(system, message)
        await quiet(system)
        return router

    router = run_worker(scenario, max_model_len=200_000, num_blocks=20_000, max_num_seqs=4)
    assert router.ended[1].finish_reason == DEADLINE
    assert router.tokens[1] == expected(message, len(router.tokens[1]))[: len(router.tokens[1])]


def test_a_deadline_ends_a_waiting_sequence_without_running_it():
    async def scenario(system):
        router = connect(system)
        await router.send(sequence(1, max_tokens=8), sequence(2, deadline_ms=0))
        await router.finish(1, 2)
        return router

    router = run_worker(scenario, max_num_seqs=1)
    assert (router.ended[2].finish_reason, router.tokens[2]) == (DEADLINE, [])
    assert not router.ended[2].timings.HasField("prefill")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_slow_reader_loses_its_stream_and_nobody_else(async_scheduling):
    """The reader takes nothing: the socket fills up, then the queue, then its stream is ended."""
    many = [sequence(id, max_tokens=4000, request_id="x") for id in range(1, 65)]
    message = sequence(1, max_tokens=400)

    async def scenario(system):
        system.executor.step_seconds = 0.002
        quick = connect(system)
        # Without the probe the client's window stays at 64 KiB; with it, it grows to megabytes.
        async with grpc.aio.insecure_channel(system.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
            slow = Router(WorkerServiceStub(channel).Execute())
            await slow.send(*many)
            await quick.send(message)
            await until(lambda: system.server._broker.num_open <= 1)
            await quick.finish(1)
            await quiet(system)
            return quick.tokens[1], await slow.end()

    tokens, (code, details) = run_worker(
        scenario, max_model_len=5000, num_blocks=64 * 320, max_queued_messages=64, async_scheduling=async_scheduling
    )
    assert tokens == expected(message, 400)
    assert (code, details) == ("RESOURCE_EXHAUSTED", "the stream's reader is 64 messages behind")


def test_a_stream_that_only_cancels_leaves_nothing():
    async def scenario(system):
        for _ in range(50):
            router = connect(system)
            await router.send(sequence(1, max_tokens=50))
            router.call.cancel()
        await quiet(system)
        await until(lambda: not system.server._broker._streams)
        return (await system.stub.GetLoad(GetLoadRequest())).load

    load = run_worker(scenario)
    assert (load.num_used_blocks, load.num_running, load.num_waiting) == (0, 0, 0)


def test_garbage_ends_its_stream_only():
    async def scenario(system):
        channel_call = system.stub.Execute()
        await channel_call.write(ExecuteRequest(commands=[ExecuteCommand(group=sequence(1))]))
        reader, writer = await asyncio.open_connection(*system.address.split(":"))
        writer.write(b"\x00garbage\r\n" * 100)
        await writer.drain()
        await reader.read()
        writer.close()
        return (await run_all(system, sequence(2))).ended[2].finish_reason

    assert run_worker(scenario) == LENGTH
