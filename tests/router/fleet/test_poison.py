"""A request that its workers die of is given up, and others that they had are not."""

import asyncio

import grpc

from tests.fakes.system import error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts
from tests.router.fleet.asking import ask, refusing


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
        await until(lambda: sum(link.is_available for link in system.router.parts.workers.links.values()) == 1)
        bad = asyncio.create_task(error_of(system.ask(poison(10))))
        good = [asyncio.create_task(system.ask(ask(10))) for _ in range(5)]
        await until(lambda: len(first.received) == 6)
        for worker in (second, third):
            await worker.service.set_serving(True)
        return await bad, await asyncio.gather(*good)

    error, answers = run_system(scenario, first, second, third)
    assert error.code == grpc.StatusCode.INTERNAL
    assert [answer.usage.num_completion_tokens for answer in answers] == [10] * 5
