"""Hundreds of requests of every kind of ending: afterwards nothing of them is left. `--soak`: a hundred thousand."""

import asyncio
import gc
from contextlib import suppress

import grpc
import psutil
import pytest

from fissile.v1 import GenerateRequest, GenerationOptions
from router.answering.completion import Completion
from router.answering.request import OpenRequest
from tests.fakes.system import collect, run_system, until
from tests.fakes.worker import FakeWorker, counts, says

NUM_CLIENTS = 32
WARM_UP = 200
MAX_GROWTH_BYTES = 12 * 1024 * 1024
"""Over all requests after the warm-up, many or few. One open request holds more than 4 kB."""


def request(kind, **options):
    return GenerateRequest(text=kind, options=GenerationOptions(**options))


async def finish(stub):
    await collect(stub.Generate(request("length", max_tokens=8)))


async def stop(stub):
    await collect(stub.Generate(request("stop", stop=["lo w"])))


async def several(stub):
    await collect(stub.Generate(request("several", n=3, max_tokens=4)))


async def cancel(stub):
    call = stub.Generate(request("cancel"))
    await call.read()
    call.cancel()


async def cancel_at_once(stub):
    stub.Generate(request("cancel")).cancel()


async def time_out(stub):
    with suppress(grpc.aio.AioRpcError):
        await collect(stub.Generate(request("deadline"), timeout=0.01))


async def refuse(stub):
    with suppress(grpc.aio.AioRpcError):
        await collect(stub.Generate(request("bad", max_tokens=0)))


KINDS = (finish, stop, several, cancel, finish, cancel_at_once, time_out, refuse)


def num_alive(*classes):
    gc.collect()
    return sum(isinstance(o, classes) for o in gc.get_objects())


async def run_many(system, num_requests):
    """Returns once as many tasks run as before."""
    num_tasks = len(asyncio.all_tasks())
    left = iter(range(num_requests))

    async def client():
        for number in left:
            await KINDS[number % len(KINDS)](system.stub)
            for worker in system.workers:
                worker.forget()

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    await system.quiet()
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks)


def sizes(system):
    """Of everything that could hold on to a request."""
    links = system.router.parts.workers.links.values()
    return {
        "open requests": len(system.router.parts.open_requests),
        "waiting for a turn": system.router.parts.pacer.num_waiting,
        "sequences on links": sum(len(link._sequences) for link in links),
        "commands to send": sum(len(link._outbox) for link in links),
        "sequences on workers": sum(len(worker.running) for worker in system.workers),
        "objects": num_alive(OpenRequest, Completion),
    }


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_nothing_is_left_of_many_requests(is_soak):
    """production-stack#707."""
    num_requests = 100_000 if is_soak else 400
    workers = [FakeWorker(says("hello world"), step_seconds=0.0005), FakeWorker(counts(60), step_seconds=0.0005)]

    async def scenario(system):
        await run_many(system, WARM_UP)
        rss = psutil.Process().memory_info().rss
        await run_many(system, num_requests)
        growth = psutil.Process().memory_info().rss - rss
        return sizes(system), growth, [w.num_streams for w in workers]

    left, growth, num_streams = run_system(scenario, *workers, limit=1700)
    assert left == dict.fromkeys(left, 0)
    assert growth < MAX_GROWTH_BYTES, f"{growth / 2**20:.1f} MB"
    assert num_streams == [1, 1], "a request broke the stream of all"
