"""A worker that refuses a sequence, gives it back or sends what cannot be: it goes elsewhere, or that is its end."""

import asyncio
import itertools

import grpc
import pytest

from fissile.v1 import (
    FinishReason,
    RequestOutput,
)
from router.fleet import link as worker_link
from tests.fakes.system import error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts
from tests.router.fleet.asking import ask, expected, refusing


def test_a_request_larger_than_a_message_fails_alone(monkeypatch):
    """It is never sent: the stream that others use would break (E3)."""
    monkeypatch.setattr(worker_link, "MAX_COMMAND_BYTES", 2000)
    worker = FakeWorker(counts(100), step_seconds=0.005)

    async def scenario(system):
        other = asyncio.create_task(system.ask(ask(100)))
        await until(lambda: worker.received)
        large = ask(5)
        large.options.sampling.structured_output.regex = "a" * 2000
        error = await error_of(system.ask(large))
        await until(lambda: len(system.router.parts.open_requests) == 1)
        return error, await other

    error, answer = run_system(scenario, worker)
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert error.message.startswith("the request is too large: 20")
    assert (answer.usage.num_completion_tokens, worker.num_streams, len(worker.groups)) == (100, 1, 1)


def test_n_completions_with_a_long_schema_are_one_command_with_one_schema():
    """E3: 128 copies of it would be larger than a message."""
    worker = FakeWorker(counts(1))

    async def scenario(system):
        request = ask(1, n=128)
        request.options.sampling.structured_output.regex = "a" * 600_000
        return await system.ask(request)

    assert run_system(scenario, worker).usage.num_completion_tokens == 128
    assert (worker.batches, worker.groups[0].ByteSize() < 610_000) == ([1], True)


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
def test_a_full_or_draining_worker_hands_the_request_to_another(code):
    full, free = FakeWorker(counts(5), refuse=refusing(code)), FakeWorker(counts(5))

    async def scenario(system):
        return await asyncio.gather(*(system.ask(ask(5)) for _ in range(2)))

    answers = run_system(scenario, full, free, policy="round_robin")
    assert [a.usage.num_completion_tokens for a in answers] == [5, 5]
    assert len(free.received) == 2


def test_all_workers_full_is_resource_exhausted_with_retry_info_at_once():
    workers = [
        FakeWorker(counts(5), refuse=refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")) for _ in range(2)
    ]

    async def scenario(system):
        return await error_of(system.ask(ask(5)))

    error = run_system(scenario, *workers, worker_wait=30)
    assert (error.reason, error.message, error.retry_after) == ("RESOURCE_EXHAUSTED", "queue full", 1.0)
    assert [len(w.received) for w in workers] == [1, 1]


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        (
            refusing(grpc.StatusCode.INVALID_ARGUMENT, "too many", field="max_tokens"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "options.max_tokens: too many",
        ),
        (refusing(grpc.StatusCode.INTERNAL, "NaN logits"), grpc.StatusCode.INTERNAL, "NaN logits"),
        (refusing(grpc.StatusCode.UNIMPLEMENTED, field="sequences"), grpc.StatusCode.UNIMPLEMENTED, "options.n: no"),
    ],
)
def test_a_fault_of_the_request_itself_is_not_retried(output, code, message):
    workers = [FakeWorker(counts(5), refuse=output) for _ in range(2)]

    async def scenario(system):
        error = await error_of(system.ask(ask(5)))
        await system.quiet()
        return error

    error = run_system(scenario, *workers)
    assert (error.code, error.message) == (code, message)
    assert sum(len(w.received) for w in workers) == 1


def test_aborted_by_a_draining_worker_moves_on():
    aborted = RequestOutput(finish_reason=FinishReason.FINISH_REASON_ABORTED, detail="drained")
    draining, other = FakeWorker(counts(5), refuse=aborted), FakeWorker(counts(5))

    async def scenario(system):
        return await asyncio.gather(*(system.ask(ask(5)) for _ in range(2)))

    answers = run_system(scenario, draining, other, policy="round_robin")
    assert [a.usage.num_completion_tokens for a in answers] == [5, 5]


def test_moves_are_bounded():
    aborted = RequestOutput(finish_reason=FinishReason.FINISH_REASON_ABORTED, detail="drained")
    workers = [FakeWorker(counts(5), refuse=aborted) for _ in range(4)]

    async def scenario(system):
        return await error_of(system.ask(ask(5)))

    error = run_system(scenario, *workers, max_retries=2)
    assert error.code == grpc.StatusCode.UNAVAILABLE
    assert sum(len(w.received) for w in workers) == 3


def test_repeated_tokens_are_dropped_and_missing_ones_fetched_elsewhere():
    class Stutters(FakeWorker):
        """Says the first token twice, and the third once more in front of the fourth."""

        def _outputs(self, sequence):
            outputs = list(super()._outputs(sequence))
            overlap = RequestOutput(token_offset=2)
            for output in outputs[2:4]:
                overlap.token_ids.extend(output.token_ids)
                overlap.logprobs.extend(output.logprobs)
            return [outputs[0], outputs[0], *outputs[1:3], overlap, *outputs[4:]]

    class Forgets(FakeWorker):
        def _outputs(self, sequence):
            outputs = list(super()._outputs(sequence))
            return [*outputs[:3], *outputs[4:]]

    request = ask(10)
    request.options.sampling.num_logprobs = 0

    async def scenario(system):
        answers = [await system.ask(request) for _ in range(2)]
        await system.quiet()
        return answers

    stutters, forgets = Stutters(counts(10)), Forgets(counts(10))
    answers = run_system(scenario, stutters, forgets, policy="round_robin")
    tokens = expected(stutters.received[0], 10)
    assert [a.tokens[0] for a in answers] == [tokens] * 2
    for answer in answers:
        assert [position.logprobs[0].token_id for position in answer.logprobs[0]] == tokens


def test_a_sink_that_fails_ends_its_own_request_and_not_the_link():
    """Two hypotheses are too few for this request; the other one shares the message that brings them."""

    class Confused(FakeWorker):
        def _outputs(self, sequence):
            outputs = list(super()._outputs(sequence))
            if sequence.request_id == "bad":
                outputs[1].hypotheses.add(token_ids=[5])
            return outputs

    worker = Confused(counts(20), step_seconds=0.005)

    async def scenario(system):
        bad = ask(20, n=2)
        bad.request_id = "bad"
        error, answer = await asyncio.gather(error_of(system.ask(bad)), system.ask(ask(20)))
        await system.quiet()
        return error, answer

    error, answer = run_system(scenario, worker)
    assert (error.code, error.message) == (
        grpc.StatusCode.INTERNAL,
        "internal error; the server's log has the details",
    )
    assert answer.usage.num_completion_tokens == 20
    assert worker.num_streams == 1


class Endless(FakeWorker):
    """Sends a token more than it was asked for, and would go on."""

    def _outputs(self, sequence):
        num_tokens = itertools.count(sequence.group.max_tokens)
        yield RequestOutput(index=sequence.index, token_ids=[5] * next(num_tokens))
        for offset in num_tokens:
            yield RequestOutput(index=sequence.index, token_offset=offset - 1, token_ids=[5])


def test_more_tokens_than_were_asked_for_are_a_fault_of_the_worker():
    async def scenario(system):
        error = await error_of(system.ask(ask(5)))
        await system.quiet()
        return error

    assert run_system(scenario, Endless(counts(5))).code == grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
def test_what_a_worker_says_of_a_request_is_cut_for_the_log_and_the_client(code, caplog):
    refusal = refusing(code)
    refusal.detail = "x" * 100_000

    async def scenario(system):
        return await error_of(system.ask(ask(5)))

    with caplog.at_level("INFO"):
        error = run_system(scenario, FakeWorker(counts(5), refuse=refusal))
    assert error.code == code
    assert max(len(record.getMessage()) for record in caplog.records) < 2000
