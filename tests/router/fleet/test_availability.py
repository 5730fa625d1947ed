"""Which workers get new requests, and what waits for one."""

import asyncio
import logging

import grpc

from fissile.channel import aio_channel
from fissile.errors import UnavailableError
from fissile.v1 import (
    GenerationServiceStub,
    GetStatsRequest,
    WorkerLoad,
)
from router.config import RouterSettings
from router.server import RouterServer
from tests.fakes.system import QUICK, WAIT_SECONDS, collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts
from tests.router.fleet.asking import ask


def test_a_worker_that_is_not_serving_gets_nothing_new():
    a, b = FakeWorker(counts(3)), FakeWorker(counts(3))

    async def scenario(system):
        await a.service.set_serving(False)
        await until(lambda: not system.router.parts.workers.links[a.address].is_available)
        for _ in range(4):
            await system.ask(ask(3))
        stats = await system.stub.GetStats(GetStatsRequest())
        return {worker.address: worker.detail for worker in stats.workers}

    details = run_system(scenario, a, b, policy="round_robin")
    assert (len(a.received), len(b.received)) == (0, 4)
    assert details == {a.address: "it takes no new requests", b.address: ""}


def test_a_worker_whose_health_flips_fast_is_told_of_in_few_lines(caplog):
    worker = FakeWorker(counts(3))

    async def scenario(system):
        link = system.router.parts.workers.links[worker.address]
        for number in range(20):
            await worker.service.set_serving(number % 2 == 1)
            await until(lambda number=number: link.is_available == (number % 2 == 1))
        await system.ask(ask(3))

    with caplog.at_level(logging.INFO):
        run_system(scenario, worker)
    of_worker = [record.message for record in caplog.records if record.message.startswith("worker 127")]
    of_router = [record.message for record in caplog.records if record.message.startswith(("ready", "not ready"))]
    assert len(of_worker) <= 5 and len(of_router) <= 5


class LoadedJustNow(FakeWorker):
    """Refuses its first stream as one that loads, and no call after that."""

    is_loaded = False

    async def Execute(self, request_iterator, context):
        if not self.is_loaded:
            self.is_loaded = True
            raise UnavailableError("the model is still loading")
        async for response in super().Execute(request_iterator, context):
            yield response


def test_a_worker_that_has_loaded_between_two_calls_is_not_called_lost(caplog):
    with caplog.at_level(logging.INFO):
        answer = run_system(lambda system: system.ask(ask(3)), worker := LoadedJustNow(counts(3)))
    assert answer.usage.num_completion_tokens == 3 and worker.num_streams == 1
    assert not [record for record in caplog.records if " lost " in record.message]


def test_load_that_another_router_put_on_a_worker_counts():
    """smg#1621: two routers, two workers, one of them busy for the other router."""
    a, b = (FakeWorker(counts(400), step_seconds=0.01, max_model_len=1000) for _ in range(2))

    async def scenario(system):
        other = RouterServer(RouterSettings(**{**QUICK, "workers": [a.address]}))
        await other.start()
        await until(lambda: other.parts.workers.is_ready)
        async with aio_channel(f"127.0.0.1:{other.port}") as channel:
            calls = [GenerationServiceStub(channel).Generate(ask(400)) for _ in range(5)]
            await until(lambda: len(a.received) == 5)
            link = system.router.parts.workers.links[a.address]
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
        await until(lambda: system.router.parts.workers.links[busy.address].load.num_sequences == 3)
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
        await until(lambda: old.successor.service and system.router.parts.workers.is_ready)
        (link,) = system.router.parts.workers.links.values()
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
        await until(lambda: not system.router.parts.workers.is_ready)
        return answer

    return wait()


def test_shutdown_ends_a_request_that_waits_for_a_worker():
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        answer = await waiting_for_a_worker(system)
        await system.router.parts.open_requests.close(0.05)
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
        await until(lambda: not len(system.router.parts.open_requests))
        return error, dict(system.router.parts.metrics.finished)

    error, finished = run_system(scenario, worker, worker_wait=1000)
    assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert sum(finished.values()) == 1
