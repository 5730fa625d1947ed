"""Workers that answer nothing, make no step, or forget a sequence: how each is told from one that is slow."""

import asyncio
from types import SimpleNamespace

import grpc

from fissile.v1 import GenerateRequest, TokenSequence
from router.answering.hop import Stay
from router.fleet import link as worker_link
from router.fleet.health.breaker import Breaker
from tests.fakes.system import error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts
from tests.router.fleet.asking import ask, expected


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


def test_the_wait_for_a_first_token_is_over_when_it_comes():
    """An answer may take longer than that."""

    async def scenario():
        timers = [asyncio.get_running_loop().call_later(1000, print) for _ in range(2)]
        hop = SimpleNamespace(attempt=Breaker("a").attempt, abort=print)
        stays = [Stay(hop, (), (), print, timer) for timer in timers]
        came = [stays[0].output_came(), stays[0].output_came()]
        stays[1].leave()
        return came, [stay.awaits_first_output for stay in stays], [timer.cancelled() for timer in timers]

    assert asyncio.run(scenario()) == ([True, False], [False, False], [True, True])


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
        links = [system.router.parts.workers.links[worker.address] for worker in (a, b)]
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
        return system.router.parts.workers.links[hung.address].breaker.reason

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
        await until(lambda: not system.router.parts.workers.links[b.address].is_available)
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


class Deaf(FakeWorker):
    """Reads none of its commands, and answers all else."""

    async def _read(self, stream, requests, has_news):
        await asyncio.Event().wait()


def test_what_waits_for_a_worker_that_does_not_read_has_a_bound(monkeypatch):
    """A client that opens and gives up, again and again, leaves nothing in its budget, and its commands with us."""
    monkeypatch.setattr(worker_link, "MAX_OUTBOX_BYTES", 500_000)

    async def scenario(system):
        (link,) = system.router.parts.workers.links.values()
        calls = []
        while link.has_room:
            call = system.stub.Generate(GenerateRequest(tokens=TokenSequence(token_ids=[3] * 60_000)))
            calls.append(call)
            await until(lambda: len(link._sequences) or not link.has_room)
            call.cancel()
            await until(lambda: not len(link._sequences))
        late = asyncio.ensure_future(error_of(system.ask(ask(5), timeout=0.2)))
        await until(lambda: len(system.router.parts.admission.queue))
        return len(calls), (await late).code, link._outbox.num_bytes

    num_calls, code, num_bytes = run_system(scenario, Deaf(counts(5), max_model_len=100_000))
    assert num_calls > 5 and code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 500_000 <= num_bytes < 600_000
