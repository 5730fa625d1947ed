"""Workers that die, hang, refuse or are not there: a request moves on, or ends with a status."""

import asyncio

import grpc
import pytest

from fissile.channel import aio_channel
from fissile.v1 import (
    FinishReason,
    GenerateRequest,
    GenerationOptions,
    GenerationServiceStub,
    GetStatsRequest,
    OutputOptions,
    RequestOutput,
    SamplingParams,
    WorkerLoad,
)
from router.config import RouterSettings
from router.fleet import link as worker_link
from router.server import RouterServer
from tests.fakes import tokenizer as toys
from tests.fakes.system import QUICK, WAIT_SECONDS, collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts

SEED = 123
ERROR = FinishReason.FINISH_REASON_ERROR
ABORTED = FinishReason.FINISH_REASON_ABORTED


def ask(length=40, n=1):
    return GenerateRequest(
        text="hello",
        options=GenerationOptions(
            n=n, max_tokens=length, sampling=SamplingParams(seed=SEED), output=OutputOptions(token_ids=True)
        ),
    )


def refusing(code, detail="no", **fields):
    return RequestOutput(finish_reason=ERROR, error_code=code.value[0], detail=detail, **fields)


def expected(worker_sequence, length):
    return counts(length)(worker_sequence)


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


def test_a_worker_that_never_answers_costs_only_its_requests_a_bounded_wait():
    """production-stack#749."""
    hung, good = FakeWorker(counts(5), mute_after=0), FakeWorker(counts(5))

    async def scenario(system):
        answers = await asyncio.gather(*(system.ask(ask(5)) for _ in range(6)))
        await system.quiet()
        return answers

    answers = run_system(scenario, hung, good, first_token_timeout=0.3, policy="round_robin")
    assert [a.usage.num_completion_tokens for a in answers] == [5] * 6
    assert (len(hung.received), len(good.received)) == (3, 6)
    assert sorted(hung.aborted) == [s.id for s in hung.received]


def test_a_worker_that_stops_making_steps_is_given_up():
    hung, good = FakeWorker(counts(20), mute_after=7), FakeWorker(counts(20))

    async def scenario(system):
        return await asyncio.gather(*(system.ask(ask(20)) for _ in range(2)))

    answers = run_system(scenario, hung, good, silence_timeout=0.3, policy="round_robin")
    assert [a.tokens[0] for a in answers] == [expected(good.received[0], 20)] * 2
    assert len(good.received) == 2


class Stopped(FakeWorker):
    """As after SIGSTOP, once `is_stopped`: its connections stay, and nothing comes."""

    def __post_init__(self):
        super().__post_init__()
        self.is_stopped = False

    async def _wait_while_stopped(self):
        while self.is_stopped:
            await asyncio.sleep(0.01)

    async def GetLoad(self, request, context):
        await self._wait_while_stopped()
        return await super().GetLoad(request, context)

    async def GetWorker(self, request, context):
        await self._wait_while_stopped()
        return await super().GetWorker(request, context)

    def _step(self, stream):
        return [] if self.is_stopped else super()._step(stream)


def test_a_stopped_worker_is_given_up_with_or_without_requests():
    a, b = Stopped(counts(200)), Stopped(counts(200))

    async def scenario(system):
        links = [system.router.workers.links[worker.address] for worker in (a, b)]
        await b.service.set_serving(False)
        await until(lambda: not links[1].is_available)
        task = asyncio.create_task(system.ask(ask(200)))
        await until(lambda: a.num_emitted > 5)
        await b.service.set_serving(True)
        a.is_stopped = True
        answer = await task
        b.is_stopped = True
        await until(lambda: not system.router.is_ready)
        a.is_stopped = b.is_stopped = False
        return answer, [link.detail for link in links]

    answer, details = run_system(scenario, a, b, probe_timeout=0.1)
    assert answer.tokens[0] == expected(a.received[0], 200)
    assert details[1].startswith("nothing was heard of it for 0.")


def test_a_worker_that_owes_endings_is_given_up_though_its_requests_have_left_it():
    """Its engine hangs, it answers what it is asked, and each request ends by its own deadline before that is known."""

    class Hangs(FakeWorker):
        def _step(self, stream):
            return []

    hung = Hangs(counts(5))

    async def scenario(system):
        for _ in range(20):
            await error_of(system.ask(ask(5), timeout=0.03))
        await until(lambda: hung.num_streams >= 2)
        return system.router.workers.links[hung.address].breaker.reason

    assert run_system(scenario, hung, silence_timeout=0.3).startswith("no step for 0.")


def test_a_slow_step_is_no_death():
    """The worker answers, however long its step takes."""
    worker = FakeWorker(counts(5), step_seconds=0.9)

    async def scenario(system):
        return await system.ask(ask(1))

    answer = run_system(scenario, worker, probe_timeout=0.2)
    assert (answer.usage.num_completion_tokens, worker.num_streams) == (1, 1)


def test_a_sequence_that_its_worker_has_forgotten_goes_on_elsewhere(monkeypatch):
    """The worker makes steps for another one, and says that nobody waits."""
    monkeypatch.setattr("router.fleet.sequences.STALL_SECONDS", 0.1)

    class Forgets(FakeWorker):
        def _is_mute(self, running):
            return running.sequence.request_id == "forgotten" and running.next.token_offset >= 7

    a, b = (Forgets(counts(300)) for _ in range(2))
    b._is_mute = lambda running: False

    async def scenario(system):
        await b.service.set_serving(False)
        await until(lambda: not system.router.workers.links[b.address].is_available)
        other = asyncio.create_task(system.ask(ask(300)))
        forgotten = ask(20)
        forgotten.request_id = "forgotten"
        task = asyncio.create_task(system.ask(forgotten))
        await until(lambda: len(a.received) == 2)
        await b.service.set_serving(True)
        return await task, await other

    answer, other = run_system(scenario, a, b)
    began = next(asked for asked in a.received if asked.request_id == "forgotten")
    assert answer.tokens[0] == expected(began, 20)
    assert other.usage.num_completion_tokens == 300
    assert (len(b.received), a.num_streams, a.aborted) == (1, 1, [began.id])


def test_the_only_worker_lost_is_unavailable_after_a_bounded_wait():
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        call = system.stub.Generate(ask(1000))
        await call.read()
        await worker.kill()
        error = await error_of(collect(call))
        await until(lambda: not len(system.router.open_requests))
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


class Dies(FakeWorker):
    """Of a request whose id begins with "poison", once that has `num_tokens` there."""

    num_tokens = 0

    def _step(self, stream):
        for running in self.running.values():
            poisoned = running.sequence.request_id.startswith("poison")
            if poisoned and (running.next.token_offset >= self.num_tokens + len(running.sequence.member.token_ids)):
                self.dying = asyncio.create_task(self.kill())
                return []
        return super()._step(stream)


def poison(length=40, **fields):
    request = ask(length, **fields)
    request.request_id = "poison-1"
    return request


def test_a_request_that_two_workers_died_of_is_not_carried_to_a_third(caplog):
    workers = [Dies(counts(40)) for _ in range(3)]

    async def scenario(system):
        error = await error_of(system.ask(poison()))
        await system.quiet()
        return error, await system.ask(ask())

    error, answer = run_system(scenario, *workers)
    assert error.code == grpc.StatusCode.INTERNAL
    assert "gave up: 2 workers died while they had this request" in error.message
    assert sorted(len(worker.groups) for worker in workers) == [1, 1, 1], "the third has served the other request"
    assert answer.usage.num_completion_tokens == 40
    (record,) = (r for r in caplog.records if r.levelname == "ERROR")
    assert record.getMessage().startswith("request poison-1: gave up: 2 workers died")


def test_an_engine_that_failed_counts_as_a_death():
    failed = refusing(grpc.StatusCode.UNAVAILABLE, "the worker failed: rank 0 has ended", worker_failed=True)
    workers = [FakeWorker(counts(5), refuse=failed) for _ in range(3)]

    async def scenario(system):
        return await error_of(system.ask(ask(5)))

    error = run_system(scenario, *workers)
    assert (error.code, sum(len(w.groups) for w in workers)) == (grpc.StatusCode.INTERNAL, 2)


def test_a_request_that_kills_slowly_ends_too():
    """It has tokens between the deaths, so it is suspected later; but not for ever."""
    workers = [Dies(counts(400), max_model_len=1000) for _ in range(7)]
    for worker in workers:
        worker.num_tokens = 2

    async def scenario(system):
        return await error_of(system.ask(poison(400)))

    error = run_system(scenario, *workers)
    assert (error.code, sum(len(w.groups) for w in workers)) == (grpc.StatusCode.INTERNAL, 5)


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
        await until(lambda: len(system.router.open_requests) == 1)
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
        def _outputs(self, sequence):
            outputs = list(super()._outputs(sequence))
            return [outputs[0], outputs[0], *outputs[1:]]

    class Forgets(FakeWorker):
        def _outputs(self, sequence):
            outputs = list(super()._outputs(sequence))
            return [*outputs[:3], *outputs[4:]]

    async def scenario(system):
        answers = [await system.ask(ask(10)) for _ in range(2)]
        await system.quiet()
        return answers

    stutters, forgets = Stutters(counts(10)), Forgets(counts(10))
    answers = run_system(scenario, stutters, forgets, policy="round_robin")
    assert [a.tokens[0] for a in answers] == [expected(stutters.received[0], 10)] * 2


def test_a_worker_that_is_not_serving_gets_nothing_new():
    a, b = FakeWorker(counts(3)), FakeWorker(counts(3))

    async def scenario(system):
        await a.service.set_serving(False)
        await until(lambda: not system.router.workers.links[a.address].is_available)
        for _ in range(4):
            await system.ask(ask(3))
        stats = await system.stub.GetStats(GetStatsRequest())
        return {worker.address: worker.detail for worker in stats.workers}

    details = run_system(scenario, a, b, policy="round_robin")
    assert (len(a.received), len(b.received)) == (0, 4)
    assert details == {a.address: "it takes no new requests", b.address: ""}


def test_load_that_another_router_put_on_a_worker_counts():
    """smg#1621: two routers, two workers, one of them busy for the other router."""
    a, b = (FakeWorker(counts(400), step_seconds=0.01, max_model_len=1000) for _ in range(2))

    async def scenario(system):
        other = RouterServer(RouterSettings(**{**QUICK, "workers": [a.address]}))
        await other.start()
        await until(lambda: other.workers.is_ready)
        async with aio_channel(f"127.0.0.1:{other.port}") as channel:
            calls = [GenerationServiceStub(channel).Generate(ask(400)) for _ in range(5)]
            await until(lambda: len(a.received) == 5)
            link = system.router.workers.links[a.address]
            await until(lambda: link.load.num_sequences == 5)
            mine = [system.stub.Generate(ask(400)) for _ in range(4)]
            await until(lambda: len(a.received) + len(b.received) == 9)
            for call in [*calls, *mine]:
                call.cancel()
        await other.stop()

    run_system(scenario, a, b)
    assert (len(a.received), len(b.received)) == (5, 4)


def test_reported_load_of_others_is_used():
    busy, free = FakeWorker(counts(3), others=WorkerLoad(num_running=3)), FakeWorker(counts(3))

    async def scenario(system):
        await until(lambda: system.router.workers.links[busy.address].load.num_sequences == 3)
        for _ in range(3):
            await system.ask(ask(3))

    run_system(scenario, busy, free)
    assert (len(busy.received), len(free.received)) == (0, 3)


class ReplacedWhileConnecting(FakeWorker):
    """Another process takes its address once a router has fetched its tokenizer, for the first time."""

    successor: FakeWorker | None = None

    async def GetTokenizer(self, request, context):
        async for part in super().GetTokenizer(request, context):
            yield part
        self.replacing = asyncio.create_task(self.replace())

    async def replace(self):
        await self.service.close(0.1)
        self.running.clear()
        self.successor.port = self.port
        await self.successor.start()


def test_a_worker_replaced_while_a_router_connects_is_not_taken_for_the_old_one():
    """Its answer to GetWorker and its stream would be of two processes, with the model of the first."""
    old = ReplacedWhileConnecting(counts(5), model="old")
    old.successor = FakeWorker(counts(5), model="new")

    async def scenario(system):
        await until(lambda: old.successor.service and system.router.workers.is_ready)
        (link,) = system.router.workers.links.values()
        await until(lambda: link.is_available and old.successor.num_streams)
        described = (link.info.model, link.info.epoch)
        await old.successor.kill()
        return described

    assert run_system(scenario, old, wait_ready=False) == ("new", old.successor.epoch)


def waiting_for_a_worker(system, **call):
    """A request whose worker has gone, and that waits for another one."""

    async def wait():
        answer = system.stub.Generate(ask(1000), **call)
        await answer.read()
        await system.workers[0].kill()
        await until(lambda: not system.router.workers.is_ready)
        return answer

    return wait()


def test_shutdown_ends_a_request_that_waits_for_a_worker():
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        answer = await waiting_for_a_worker(system)
        await system.router.open_requests.close(0.05)
        async with asyncio.timeout(WAIT_SECONDS):
            return await error_of(collect(answer))

    error = run_system(scenario, worker, worker_wait=1000)
    assert (error.code, error.message) == (
        grpc.StatusCode.UNAVAILABLE,
        "the router shut down before the request was finished",
    )


def test_the_deadline_ends_a_request_that_waits_for_a_worker():
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        answer = await waiting_for_a_worker(system, timeout=0.5)
        error = await error_of(collect(answer))
        await until(lambda: not len(system.router.open_requests))
        return error, dict(system.router.metrics.finished)

    error, finished = run_system(scenario, worker, worker_wait=1000)
    assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert sum(finished.values()) == 1


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


def test_those_that_waited_beside_a_poisoned_request_do_not_share_its_end():
    """None has a token when the first worker dies, and any may be what it died of: they go to the next one by one."""

    class Slow(Dies):
        """Nobody gets a token before the poison works."""

        def _step(self, stream):
            if self.num_together > 1 and len(self.running) < self.num_together:
                return []
            self.num_together = 0
            return super()._step(stream)

    first, second, third = (Slow(counts(10), step_seconds=0.01) for _ in range(3))
    first.num_together, second.num_together, third.num_together = 6, 0, 0

    async def scenario(system):
        for worker in (second, third):
            await worker.service.set_serving(False)
        await until(lambda: sum(link.is_available for link in system.router.workers.links.values()) == 1)
        bad = asyncio.create_task(error_of(system.ask(poison(10))))
        good = [asyncio.create_task(system.ask(ask(10))) for _ in range(5)]
        await until(lambda: len(first.received) == 6)
        for worker in (second, third):
            await worker.service.set_serving(True)
        return await bad, await asyncio.gather(*good)

    error, answers = run_system(scenario, first, second, third)
    assert error.code == grpc.StatusCode.INTERNAL
    assert [answer.usage.num_completion_tokens for answer in answers] == [10] * 5
