"""Every way a request ends but stop strings: cancel, deadline, a slow reader. Nothing stays open anywhere."""

import asyncio
import gc
import tracemalloc
from dataclasses import dataclass

import grpc
import pytest

from fissile.v1 import FinishReason, GenerateRequest, GenerationOptions, GenerationServiceStub, OutputOptions, Prompt
from router.answering.request import OpenRequest
from router.fleet.dispatch import Journeys
from router.fleet.outbox import MAX_BATCH_COMMANDS
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts, says


def test_cancel_reaches_the_worker():
    """Case 18."""
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        call = system.stub.Generate(GenerateRequest(text="a"))
        for _ in range(3):
            await call.read()
        call.cancel()
        await system.quiet()
        return system.router.parts.metrics.finished["cancelled"]

    assert run_system(scenario, worker) == 1
    assert worker.aborted == [worker.received[0].id]
    assert worker.num_emitted < 50


def test_a_request_that_has_ended_needs_no_garbage_collector():
    """What it had goes at once: a router of many short requests would else be walked through all the time."""

    async def scenario(system):
        gc.collect()
        gc.disable()
        try:
            await system.ask(GenerateRequest(text="a"))
            await system.quiet()
            return [one for one in gc.get_objects() if type(one) is OpenRequest]
        finally:
            gc.enable()

    assert run_system(scenario, FakeWorker(says("ABC"))) == []


def test_the_deadline_reaches_worker_and_client():
    worker = FakeWorker(counts(1000), step_seconds=0.02)

    async def scenario(system):
        error = await error_of(system.ask(GenerateRequest(text="a"), timeout=0.3))
        await system.quiet()
        return error, dict(system.router.parts.metrics.finished)

    error, finished = run_system(scenario, worker)
    assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < worker.groups[0].deadline_ms <= 300
    assert worker.aborted == [worker.received[0].id]
    assert sum(finished.values()) == 1


def test_without_deadline_none_is_sent():
    worker = FakeWorker(says("x"))

    async def scenario(system):
        await system.ask(GenerateRequest(text="a"), timeout=None)

    run_system(scenario, worker)
    assert not worker.groups[0].HasField("deadline_ms")


SMALL_WINDOW = [("grpc.http2.bdp_probe", 0)]
"""A client that lets 64 KiB come unread, however fast the network is."""


def test_a_slow_reader_gets_everything_in_few_messages_and_holds_up_nobody():
    """While nobody reads, tokens merge. Cumulative messages fill the window after some hundred of 4000."""
    worker = FakeWorker(counts(4000), step_seconds=0, max_model_len=5000)
    options = GenerationOptions(stop=["never seen"], output=OutputOptions(token_ids=True, cumulative=True))

    async def scenario(system):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{system.port}", options=SMALL_WINDOW) as channel:
            slow = GenerationServiceStub(channel).Generate(GenerateRequest(text="a", options=options))
            messages = [await slow.read()]
            ((opened,),) = system.router.parts.open_requests._by_id.values()
            other = await system.ask(GenerateRequest(text="b", options=GenerationOptions(max_tokens=2000)))
            await until(lambda: opened.is_finished)
            while (message := await slow.read()) is not grpc.aio.EOF:
                messages.append(message)
        await system.quiet()
        return messages, other

    messages, other = run_system(scenario, worker, max_message_rate=1e9)
    assert messages[-1].usage.num_completion_tokens == 4000
    assert list(messages[-1].completions[0].token_ids) == counts(4000)(worker.received[0])
    assert messages[-1].completions[0].finish.reason == FinishReason.FINISH_REASON_LENGTH
    assert len(messages) < 1000
    assert other.usage.num_completion_tokens == 2000


def test_what_waits_for_a_slow_reader_costs_some_bytes_a_token():
    """Not a message a token: the reader may be slow for as long as the model's context lasts."""
    num_tokens = 20_000
    worker = FakeWorker(counts(num_tokens), step_seconds=0, tokens_per_step=20, max_model_len=num_tokens + 100)

    async def scenario(system):
        system.router.parts.pacer._allowance = 0
        call = system.stub.Generate(GenerateRequest(text="a"))
        await call.read()
        ((opened,),) = system.router.parts.open_requests._by_id.values()
        tracemalloc.start()
        await until(lambda: len(opened.completions[0].token_ids) > num_tokens * 3 // 4)
        size = sum(trace.size for trace in tracemalloc.take_snapshot().statistics("filename") if in_router(trace))
        tracemalloc.stop()
        await collect(call)
        return size

    def in_router(trace):
        return "/router/answering/completion.py" in trace.traceback[0].filename

    size = run_system(scenario, worker, max_message_rate=1e-6)
    assert 0 < size < num_tokens * 100


def test_initial_metadata_comes_before_the_first_token():
    async def scenario(system):
        call = system.stub.Generate(GenerateRequest(text="a"))
        async with asyncio.timeout(5):
            await call.initial_metadata()
        call.cancel()

    run_system(scenario, FakeWorker(says("x"), mute_after=0))


def test_a_client_that_stops_reading_and_then_cancels_leaves_nothing():
    """Cumulative messages fill the socket, so that the router is waiting for the client when the cancel comes."""
    worker = FakeWorker(counts(4000), step_seconds=0.001, tokens_per_step=4, max_model_len=5000)

    async def scenario(system):
        output = OutputOptions(cumulative=True, token_ids=True)
        call = system.stub.Generate(GenerateRequest(text="a", options=GenerationOptions(output=output)))
        await call.read()
        await until(lambda: worker.num_emitted > 3000)
        call.cancel()
        async with asyncio.timeout(5):
            await system.quiet()
        return dict(system.router.parts.metrics.finished)

    assert run_system(scenario, worker) == {"cancelled": 1}


def test_clients_that_leave_while_they_are_written_to_are_no_fault(caplog):
    """E8."""
    worker = FakeWorker(counts(1000), step_seconds=0.0, max_model_len=2000)

    async def scenario(system):
        for number in range(40):
            calls = [system.stub.Generate(GenerateRequest(text="a"), timeout=20) for _ in range(4)]
            for call in calls[: number % 4 + 1]:
                await call.read()
            for call in calls:
                call.cancel()
        await system.quiet()

    with caplog.at_level("INFO"):
        run_system(scenario, worker)
    assert [r.getMessage() for r in caplog.records if r.exc_info or r.levelname in ("WARNING", "ERROR")] == []


def test_many_sequences_are_aborted_in_order_over_several_messages():
    """32 × 128 of them held the loop for 22 ms, half of it to make one message."""
    worker = FakeWorker(counts(900))

    async def scenario(system):
        prompts = [Prompt(text="a")] * 4
        call = system.stub.Generate(GenerateRequest(prompts=prompts, options=GenerationOptions(max_tokens=900, n=128)))
        await until(lambda: len(worker.received) == 512)
        worker.batches.clear()
        call.cancel()
        await system.quiet()

    run_system(scenario, worker)
    assert worker.aborted == [asked.id for asked in worker.received]
    assert max(worker.batches) <= MAX_BATCH_COMMANDS


@dataclass
class Journey:
    """Whose end has room in the loop's next turn."""

    ended: list[int]
    number: int

    async def turn_of_loop(self):
        await asyncio.sleep(0)

    def end(self):
        self.ended.append(self.number)


def test_a_call_that_is_cancelled_while_it_ends_ends_whole():
    ended = []
    journeys = Journeys([Journey(ended, number) for number in range(9)])

    async def scenario():
        ending = asyncio.create_task(journeys.__aexit__(None, None, None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert ended == [0, 1]
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending

    asyncio.run(scenario())
    assert ended == list(range(9))
