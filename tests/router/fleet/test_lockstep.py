"""Workers that step together end together: a request that loses one is not sent to the others, and is not blamed for
their end."""

import asyncio

import grpc

from fissile.v1 import (
    FinishReason,
    GenerateRequest,
    GenerationOptions,
    GetStatsRequest,
    OutputOptions,
    RequestOutput,
    SamplingParams,
)
from router.fleet.health import lockstep
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts

LENGTH = 40


def ask():
    sampling, output = SamplingParams(seed=123), OutputOptions(token_ids=True)
    return GenerateRequest(text="hello", options=GenerationOptions(max_tokens=LENGTH, sampling=sampling, output=output))


def member(rank=0, group="group-1", **fields):
    return FakeWorker(counts(LENGTH), dp_rank=rank, dp_size=2, lockstep_group=group, **fields)


def alone():
    return FakeWorker(counts(LENGTH))


async def serve(system, *workers):
    """These and no others take new requests."""
    for worker in system.workers:
        await worker.service.set_serving(worker in workers)
    await until(lambda: {link.address for link in available(system)} == {worker.address for worker in workers})


def available(system):
    return [link for link in system.router.parts.workers.links.values() if link.is_available]


async def start(system, first):
    """A request that has some of its tokens from `first`."""
    await serve(system, first)
    task = asyncio.create_task(collect(system.stub.Generate(ask())))
    await until(lambda: first.num_emitted >= 5)
    return task


def test_who_loses_one_goes_on_at_a_worker_of_another_group_token_for_token():
    first, sibling, other = member(0, step_seconds=0.01), member(1), alone()

    async def scenario(system):
        task = await start(system, first)
        await serve(system, *system.workers)
        await first.kill()
        answer = await task
        stats = await system.stub.GetStats(GetStatsRequest())
        return answer, {worker.address: worker.detail for worker in stats.workers}

    answer, details = run_system(scenario, first, sibling, other)
    assert answer.tokens[0] == counts(LENGTH)(first.received[0])
    assert (len(sibling.received), len(other.received)) == (0, 1)
    assert details[sibling.address] == "a worker that it steps together with is lost"


def test_where_the_group_was_all_that_is_left_a_request_is_unavailable():
    first, sibling = member(0, step_seconds=0.01), member(1, step_seconds=0.01)

    async def scenario(system):
        task = asyncio.create_task(error_of(system.ask(ask())))
        await until(lambda: first.num_emitted + sibling.num_emitted >= 5)
        dying, left = (first, sibling) if first.received else (sibling, first)
        await dying.kill()
        error = await task
        await left.kill()
        return error, left

    error, left = run_system(scenario, first, sibling, worker_wait=0.3)
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert error.message.startswith("no healthy worker for toy within 0.3 s; the last one: worker ")
    assert not left.received


def test_a_sibling_that_ends_late_is_the_same_death(monkeypatch):
    """Two deaths in a row would end the request as what its workers died of."""
    monkeypatch.setattr(lockstep, "DOUBT_SECONDS", 0.05)
    first, sibling, other = member(0, mute_after=0), member(1, mute_after=0), alone()

    async def scenario(system):
        await serve(system, first)
        task = asyncio.create_task(system.ask(ask()))
        await until(lambda: first.received)
        await serve(system, first, sibling)
        for worker in (first, sibling):
            await until(lambda worker=worker: worker.received)
            await worker.kill()
        await other.service.set_serving(True)
        return await task

    answer = run_system(scenario, first, sibling, other, worker_wait=30.0)
    assert answer.tokens[0] == counts(LENGTH)(other.received[0])


def test_two_groups_that_died_of_it_are_two_deaths():
    first, second, other = member(group="group-1", mute_after=0), member(group="group-2", mute_after=0), alone()

    async def scenario(system):
        await serve(system, first, second)
        task = asyncio.create_task(error_of(system.ask(ask())))
        await until(lambda: first.received or second.received)
        for worker in (first, second) if first.received else (second, first):
            await until(lambda worker=worker: worker.received)
            await worker.kill()
        await other.service.set_serving(True)
        return await task

    error = run_system(scenario, first, second, other)
    assert error.code is grpc.StatusCode.INTERNAL
    assert "gave up: 2 workers died while they had this request" in error.message


def test_a_group_that_outlives_a_lost_connection_is_used_again(monkeypatch):
    monkeypatch.setattr(lockstep, "DOUBT_SECONDS", 0.2)
    first, sibling = member(0, step_seconds=0.01), member(1)

    async def scenario(system):
        task = await start(system, first)
        await serve(system, first, sibling)
        await first.kill()
        await until(lambda: not available(system))
        return await task

    answer = run_system(scenario, first, sibling, worker_wait=30.0)
    assert answer.tokens[0] == counts(LENGTH)(first.received[0])
    assert len(sibling.received) == 1


def test_a_member_whose_engine_failed_takes_the_others_along():
    """It says so before its stream ends, and its group may have nothing else to say."""
    failed = RequestOutput(
        finish_reason=FinishReason.FINISH_REASON_ERROR,
        error_code=grpc.StatusCode.UNAVAILABLE.value[0],
        detail="the worker failed: data-parallel rank 1 is gone",
        worker_failed=True,
    )
    first, sibling, other = member(0, refuse=failed), member(1, refuse=failed), alone()

    async def scenario(system):
        await serve(system, first, sibling)
        task = asyncio.create_task(system.ask(ask()))
        await until(lambda: not available(system))
        await other.service.set_serving(True)
        return await task

    answer = run_system(scenario, first, sibling, other, worker_wait=30.0)
    assert answer.tokens[0] == counts(LENGTH)(other.received[0])
    assert len(first.received) + len(sibling.received) == 1


def test_those_that_meet_again_are_another_group():
    first, sibling = member(0), member(1)

    async def scenario(system):
        for worker in (first, sibling):
            await worker.kill()
        await until(lambda: not available(system))
        for worker in (first, sibling):
            worker.lockstep_group, worker.epoch = "group-2", f"{worker.epoch} again"
            await worker.start()
        await until(lambda: len(available(system)) == 2)
        return await system.ask(ask())

    assert run_system(scenario, first, sibling).usage.num_completion_tokens == LENGTH


def test_workers_that_step_alone_say_nothing_of_each_other():
    """Ranks of one size are no group."""
    first, second = member(0, group="", step_seconds=0.01), member(1, group="", step_seconds=0.01)

    async def scenario(system):
        task = asyncio.create_task(system.ask(ask()))
        await until(lambda: first.num_emitted + second.num_emitted >= 5)
        dying, left = (first, second) if first.received else (second, first)
        await dying.kill()
        await task
        return len(left.received), [link.address for link in available(system)] == [left.address]

    assert run_system(scenario, first, second) == (1, True)
