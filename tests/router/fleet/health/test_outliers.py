"""Workers that fail what they get, in a fleet of real links: fast failure looks idle."""

import asyncio

import grpc

from fissile.v1 import FinishReason, GenerateRequest, GenerationOptions, RequestOutput
from tests.fakes.system import error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts

NUM_REQUESTS = 200
BROKEN = RequestOutput(
    finish_reason=FinishReason.FINISH_REASON_ERROR, error_code=grpc.StatusCode.INTERNAL.value[0], detail="broken"
)
BAD_FIELD = RequestOutput(
    finish_reason=FinishReason.FINISH_REASON_ERROR, error_code=grpc.StatusCode.INVALID_ARGUMENT.value[0], detail="no"
)


def ask(**options):
    return GenerateRequest(text="hello", options=GenerationOptions(max_tokens=5, **options))


async def ask_many(system, num_clients=8):
    left = iter(range(NUM_REQUESTS))

    async def client():
        return [await asyncio.gather(system.ask(ask()), return_exceptions=True) for _ in left]

    answers = [answer for part in await asyncio.gather(*(client() for _ in range(num_clients))) for (answer,) in part]
    return sum(isinstance(answer, BaseException) for answer in answers)


def test_a_worker_that_fails_all_at_once_gets_few_of_many_requests(caplog):
    """Seen: 194 of 200."""
    broken = FakeWorker(counts(5), refuse=BROKEN)
    workers = [broken, *(FakeWorker(counts(5), step_seconds=0.005) for _ in range(3))]

    async def scenario(system):
        return await ask_many(system)

    num_failed = run_system(scenario, *workers)
    # Five in a row, and what was on its way there with them.
    assert num_failed == len(broken.received) <= 12
    # On a slow machine it was on trial since.
    assert caplog.messages[0].startswith(f"worker {broken.address} gets no requests for")
    assert caplog.messages[0].endswith("5 requests in a row failed")


def test_it_comes_back_when_it_answers_well(monkeypatch):
    monkeypatch.setattr("router.fleet.health.breaker.OPEN_SECONDS", 0.1)
    broken, other = FakeWorker(counts(5), refuse=BROKEN), FakeWorker(counts(5))

    async def scenario(system):
        link = system.router.parts.workers.links[broken.address]
        while link.breaker.is_closed:
            await asyncio.gather(system.ask(ask()), return_exceptions=True)
        broken.refuse = None
        await until(lambda: link.breaker.admits)
        while not link.breaker.is_closed:
            await system.ask(ask())

    run_system(scenario, broken, other)
    assert len(broken.received) >= 5 + 3


def test_a_lone_worker_is_never_ejected_and_bad_requests_are_nobodys_fault():
    alone = FakeWorker(counts(5), refuse=BROKEN)

    async def scenario(system):
        codes = []
        for refusal in [BROKEN] * 20 + [BAD_FIELD] * 20:
            alone.refuse = refusal
            codes.append((await error_of(system.ask(ask()))).code)
        return codes

    codes = run_system(scenario, alone)
    assert codes == [grpc.StatusCode.INTERNAL] * 20 + [grpc.StatusCode.INVALID_ARGUMENT] * 20


def test_bad_requests_and_full_workers_are_nobodys_fault():
    full = RequestOutput(
        finish_reason=FinishReason.FINISH_REASON_ERROR, error_code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    )
    worker, other = FakeWorker(counts(5)), FakeWorker(counts(5))

    async def scenario(system):
        for refusal in [full, BAD_FIELD] * 10:
            worker.refuse = other.refuse = refusal
            await error_of(system.ask(ask()))
        return [link.breaker.is_closed for link in system.router.parts.workers.links.values()]

    assert run_system(scenario, worker, other) == [True, True]
