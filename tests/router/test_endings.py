"""Every way a request ends: stop strings, cancel, deadline, a slow reader. Nothing stays open anywhere."""

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
from tests.fakes import tokenizer as toys
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts, says

STOP_STRING = FinishReason.FINISH_REASON_STOP_STRING


def stopped(worker, stop, **options):
    """Answer with stop strings, once the system is quiet."""

    async def scenario(system):
        request = GenerateRequest(
            text="a", options=GenerationOptions(stop=stop, output=OutputOptions(token_ids=True), **options)
        )
        answer = await system.ask(request)
        await system.quiet()
        return answer

    return run_system(scenario, worker)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
@pytest.mark.parametrize(("include", "text"), [(False, "A"), (True, "ABCDE")])
def test_a_stop_across_tokens_ends_text_tokens_and_usage(include, text, tokens_per_step):
    """Cases 47, 50."""
    worker = FakeWorker(says("ABCDEFGHIJ", eos=False), tokens_per_step=tokens_per_step)
    answer = stopped(worker, ["BCDE"], include_stop=include)
    assert (answer.text, answer.finishes[0].reason, answer.finishes[0].stop) == (text, STOP_STRING, "BCDE")
    assert toys.byte_level().decode(answer.tokens[0]) == "ABCDE"
    assert answer.usage.num_completion_tokens == 5


def test_the_worker_is_aborted_at_the_stop():
    """vllm#57052."""
    worker = FakeWorker(says("ABCDE" + "x" * 900, eos=False), step_seconds=0.01)
    answer = stopped(worker, ["E"])
    assert worker.aborted == [worker.received[0].id]
    assert answer.usage.num_completion_tokens == 5
    assert (answer.usage.num_cached_tokens, answer.timings.worker_queued.ToMilliseconds()) == (4, 7)
    assert worker.num_emitted <= 12


def test_a_stop_at_the_very_last_token_counts():
    answer = stopped(FakeWorker(says("ABC", eos=False)), ["C"], max_tokens=3)
    assert (answer.text, answer.finishes[0].reason) == ("AB", STOP_STRING)


@pytest.mark.parametrize(
    ("worker", "options", "reason"),
    [
        (FakeWorker(says("ABC")), {}, FinishReason.FINISH_REASON_EOS),
        (FakeWorker(says("ABCD", eos=False)), {"max_tokens": 3}, FinishReason.FINISH_REASON_LENGTH),
    ],
    ids=["eos", "length"],
)
def test_held_text_comes_out_at_every_end(worker, options, reason):
    """Case 48, smg#2203."""
    answer = stopped(worker, ["BCDE"], **options)
    assert (answer.text, answer.finishes[0].reason) == ("ABC", reason)


def test_text_that_was_no_stop_arrives():
    assert stopped(FakeWorker(says("ABCX")), ["BCDE"]).text == "ABCX"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a<|im_start|>")])
def test_a_special_token_as_stop_string(include, text):
    """Case 58: it has no text of its own, and ends the completion all the same."""
    answer = stopped(FakeWorker(says("a<|im_start|>b")), ["<|im_start|>"], include_stop=include)
    assert (answer.text, answer.finishes[0].reason) == (text, STOP_STRING)
    assert answer.finishes[0].stop == "<|im_start|>"
    assert answer.usage.num_completion_tokens == 2


def test_a_special_token_that_the_model_does_not_have_never_comes():
    """So it is no stop, and no reason to refuse the request: the client has named no token."""
    tokenizer = toys.byte_level()
    tokenizer.add_special_tokens(["<|late|>"])
    worker = FakeWorker(says("abc"), files=toys.files(tokenizer), vocab_size=tokenizer.token_to_id("<|late|>"))
    answer = stopped(worker, ["<|late|>", "c"])
    assert (answer.text, answer.finishes[0].stop) == ("ab", "c")


FALLBACK = toys.byte_fallback()
PARIS, END = FALLBACK.token_to_id("▁Paris"), FALLBACK.token_to_id("</s>")
NEWLINE, E1, E2 = (FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in (0x0A, 0xC3, 0xA9))


@pytest.mark.parametrize("tokens_per_step", [1, 100])
@pytest.mark.parametrize(
    ("tokens", "stop", "num_tokens"),
    [
        ([PARIS, NEWLINE, PARIS, PARIS], "\n", 2),
        ([PARIS, NEWLINE, END], "\n", 2),
        ([PARIS, NEWLINE, NEWLINE, END], "\n\n", 3),
        ([PARIS, E1, E2], "é", 3),
        ([PARIS, E1, E2, NEWLINE, 0xFF], "é\n", 4),
    ],
    ids=["followed", "eos", "two", "length", "longer"],
)
def test_a_stop_of_byte_tokens_ends_at_the_token_that_completes_it(tokens, stop, num_tokens, tokens_per_step):
    """A line end is a byte in Llama 2's vocabulary: a run of these is held back without stop strings, but not here."""
    worker = FakeWorker(lambda asked: tokens, files=toys.files(FALLBACK), tokens_per_step=tokens_per_step)
    answer = stopped(worker, [stop], max_tokens=len(tokens))
    assert (answer.text, answer.finishes[0].reason, answer.finishes[0].stop) == (" Paris", STOP_STRING, stop)
    assert (answer.tokens[0], answer.usage.num_completion_tokens) == (tokens[:num_tokens], num_tokens)


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"max_tokens": 2}, "A", STOP_STRING),
        ({"max_tokens": 2, "include_stop": True}, "A\ufffd", STOP_STRING),
        ({"max_tokens": 2, "min_tokens": 2}, "A", STOP_STRING),
        ({"max_tokens": 4, "min_tokens": 4}, "A\ufffdBB", FinishReason.FINISH_REASON_LENGTH),
    ],
)
def test_a_stop_that_only_the_end_completes_counts(options, text, reason):
    """A character that is cut off becomes text when nothing more comes."""
    first_of_two = toys.byte_level().encode("é", add_special_tokens=False).ids[0]
    a, b = (toys.byte_level().token_to_id(letter) for letter in "AB")
    answer = stopped(FakeWorker(lambda asked: [a, first_of_two, b, b]), ["\ufffd"], **options)
    assert (answer.text, answer.finishes[0].reason) == (text, reason)


def test_no_stop_before_min_tokens():
    answer = stopped(FakeWorker(says("ABABAB", eos=False)), ["AB"], min_tokens=3)
    assert (answer.text, answer.usage.num_completion_tokens) == ("AB", 4)


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
