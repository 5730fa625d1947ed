"""A request whose worker is lost goes on at another one, as if nothing had happened."""

import asyncio

import grpc
import pytest

from fissile.v1 import (
    FinishReason,
    GenerationServiceStub,
    GetStatsRequest,
    RequestOutput,
    Sequence,
    SequenceGroup,
)
from tests.fakes import tokenizer as toys
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts
from tests.router.fleet.asking import ABORTED, SEED, ask, expected


@pytest.mark.parametrize("n", [1, 3])
def test_a_worker_killed_mid_stream_is_continued_elsewhere_without_gap_or_repeat(n):
    a, b = (FakeWorker(counts(40), step_seconds=0.01) for _ in range(2))

    async def scenario(system):
        call = system.stub.Generate(ask(n=n))
        task = asyncio.create_task(collect(call))
        await until(lambda: max(a.num_emitted, b.num_emitted) >= 5 * n)
        first, second = (a, b) if a.received else (b, a)
        await first.kill()
        answer = await task
        await system.quiet()
        return answer, first, second

    answer, first, second = run_system(scenario, a, b)
    for i in range(n):
        assert answer.tokens[i] == expected(first.received[i], 40)
        assert second.received[i].num_prompt_tokens == first.received[i].num_prompt_tokens
        assert len(second.received[i].token_ids) > second.received[i].num_prompt_tokens
        assert second.received[i].sampling.seed == SEED + i
    assert [len(group.sequences) for group in second.groups] == [n]
    assert answer.usage.num_completion_tokens == 40 * n
    assert answer.usage.num_cached_tokens == 4, "what the second one finds, the first has computed"


def test_what_was_not_sent_yet_is_sent_to_no_later_connection():
    """It has moved: there it would be computed for nobody."""

    class Nobody:
        num_losses = 0

        def on_lost(self, detail, *, worker_died=False):
            self.num_losses += 1

    async def scenario(system):
        (link,) = system.router.parts.workers.links.values()
        nobody = Nobody()
        link.start(SequenceGroup(prompt_token_ids=[5], sequences=[Sequence(index=i) for i in range(2)]), nobody, 0)
        link.abort(1)
        link._lose("cut off", worker_died=False, is_refused=False)
        return nobody.num_losses, len(link._outbox), link._outbox.num_bytes, link.load.num_open

    assert run_system(scenario, FakeWorker(counts(5))) == (1, 0, 0, 0)


@pytest.mark.parametrize("is_another_process", [True, False])
def test_a_breaker_is_of_a_process_not_of_an_address(is_another_process):
    """A worker that is started again begins anew; one whose connection was cut does not."""
    worker = FakeWorker(counts(5))

    async def scenario(system):
        (link,) = system.router.parts.workers.links.values()
        link.breaker.trip("it stood still")
        await worker.kill()
        await until(lambda: not link.is_available)
        worker.epoch += "!" * is_another_process
        await worker.start()
        await until(lambda: link.is_available)
        return link.breaker.is_closed

    assert run_system(scenario, worker) is is_another_process


def test_a_request_moves_while_its_client_does_not_read():
    """What it is to be sent next waits for the client; its tokens do not."""
    a, b = (FakeWorker(counts(4000), step_seconds=0.001, tokens_per_step=4, max_model_len=5000) for _ in range(2))
    request = ask(4000)
    request.options.output.cumulative = True

    async def scenario(system):
        options = [("grpc.http2.bdp_probe", 0)]  # a window of 64 KiB
        async with grpc.aio.insecure_channel(f"127.0.0.1:{system.port}", options=options) as channel:
            call = GenerationServiceStub(channel).Generate(request)
            await call.read()
            await until(lambda: max(a.num_emitted, b.num_emitted) > 3000)
            first, second = (a, b) if a.received else (b, a)
            await first.kill()
            await until(lambda: second.received)
            while (message := await call.read()) is not grpc.aio.EOF:
                last = message
        await system.quiet()
        return last, first

    last, first = run_system(scenario, a, b)
    assert list(last.completions[0].token_ids) == expected(first.received[0], 4000)
    assert last.usage.num_completion_tokens == 4000


def test_the_only_worker_lost_is_unavailable_after_a_bounded_wait():
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        call = system.stub.Generate(ask(1000))
        await call.read()
        await worker.kill()
        error = await error_of(collect(call))
        await until(lambda: not len(system.router.parts.open_requests))
        return error

    error = run_system(scenario, worker, worker_wait=0.2)
    assert error.code == grpc.StatusCode.UNAVAILABLE
    assert "no healthy worker for toy within 0.2 s" in error.message
    assert error.retry_after == 1.0


def test_a_worker_restarted_at_the_same_address_continues_what_it_lost():
    worker = FakeWorker(counts(40), step_seconds=0.01)

    async def scenario(system):
        task = asyncio.create_task(system.ask(ask()))
        await until(lambda: worker.num_emitted >= 5)
        await worker.kill()
        worker.epoch = "another"
        await worker.start()
        answer = await task
        return answer, (await system.stub.GetStats(GetStatsRequest())).workers[0].epoch

    answer, epoch = run_system(scenario, worker, worker_wait=10)
    assert answer.tokens[0] == expected(worker.received[0], 40)
    assert epoch == "another"


def began_at(workers):
    """The one sequence that came without tokens."""
    (first,) = (asked for worker in workers for asked in worker.received if not asked.member.token_ids)
    return first


class Drains(FakeWorker):
    """Gives back what it has once that has 5 tokens each, as a worker does that is told to leave."""

    def _outputs(self, sequence):
        back = RequestOutput(index=sequence.index, finish_reason=ABORTED, detail="the worker is shutting down")
        return [*list(super()._outputs(sequence))[:5], back]


def test_a_group_that_a_draining_worker_gives_back_goes_on_as_a_group():
    """E6. Some of it may be back before the rest: what is lost is sent once."""
    draining, other = Drains(counts(40)), FakeWorker(counts(40))

    async def scenario(system):
        answers = await asyncio.gather(*(system.ask(ask(n=3)) for _ in range(2)))
        await system.quiet()
        return answers

    for answer in run_system(scenario, draining, other, policy="round_robin"):
        assert [answer.tokens[i] for i in range(3)] == [expected(draining.received[i], 40) for i in range(3)]
    assert [len(group.sequences) for group in other.groups] == [3, 3]


def test_what_is_left_of_a_group_resumes():
    """One has hit a stop string when the worker dies."""
    a, b = (FakeWorker(counts(40), step_seconds=0.01) for _ in range(2))
    letters = toys.byte_level()

    def spelt(asked):
        return [letters.token_to_id(x) for x in ("ze" + "abcd" * 15)[asked.index :][:40]]

    a.script = b.script = spelt

    async def scenario(system):
        request = ask(n=3)
        request.options.stop.append("ze")
        task = asyncio.create_task(system.ask(request))
        await until(lambda: max(a.num_emitted, b.num_emitted) >= 12)
        first, second = (a, b) if a.received else (b, a)
        await first.kill()
        answer = await task
        await system.quiet()
        return answer, first, second

    answer, first, second = run_system(scenario, a, b)
    assert [sequence.index for sequence in second.groups[0].sequences] == [1, 2]
    assert [answer.tokens[i] for i in (1, 2)] == [spelt(first.received[i]) for i in (1, 2)]
    assert answer.finishes[0].reason == FinishReason.FINISH_REASON_STOP_STRING


def test_a_long_stream_outlives_any_number_of_workers_that_leave():
    """A rolling restart: being given back says nothing about a request, and tokens renew its budget (E10)."""
    workers = [Drains(counts(40)) for _ in range(7)] + [FakeWorker(counts(40))]

    async def scenario(system):
        return await system.ask(ask())

    answer = run_system(scenario, *workers)
    assert answer.tokens[0] == expected(began_at(workers), 40)


def test_a_stream_outlives_four_losses_with_tokens_between():
    """E10."""
    workers = [FakeWorker(counts(200), step_seconds=0.005) for _ in range(5)]

    async def scenario(system):
        task = asyncio.create_task(system.ask(ask(200)))
        for _ in range(4):
            await until(lambda: any(len(worker.running) for worker in workers))
            (busy,) = (worker for worker in workers if worker.running)
            enough = busy.num_emitted + 5
            while busy.num_emitted < enough:
                await asyncio.sleep(0.005)
            await busy.kill()
        return await task

    answer = run_system(scenario, *workers)
    assert answer.tokens[0] == expected(began_at(workers), 200)
