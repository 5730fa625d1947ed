"""What a router leaves to the garbage collector, and when that walks through everything."""

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from common import garbage
from fissile.v1 import GenerateRequest, GenerationOptions
from router import garbage as router_garbage
from tests.fakes.system import error_of, run_system
from tests.fakes.worker import FakeWorker, counts

NUM_CALLS = 30


class Cycle:
    def __init__(self):
        self.me = self


@pytest.fixture
def no_collector():
    """Nothing collects by itself meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def cycle(no_collector):
    return weakref.ref(Cycle())


def num_contexts():
    return sum(type(each).__name__ == "_ServicerContext" for each in gc.get_objects())


async def answered(system):
    await system.ask(GenerateRequest(text="a", options=GenerationOptions(max_tokens=3)))


async def refused(system):
    await error_of(system.ask(GenerateRequest(text="a", options=GenerationOptions(max_tokens=0))))


@pytest.mark.parametrize("make_call", [answered, refused])
def test_a_call_that_has_ended_is_freed_without_the_collector(no_collector, make_call):
    async def scenario(system):
        await make_call(system)
        before = num_contexts()
        for _ in range(NUM_CALLS):
            await make_call(system)
        await system.quiet()
        return num_contexts() - before

    assert run_system(scenario, FakeWorker(counts(3))) < NUM_CALLS / 3, "a few may be about to end"


@pytest.mark.parametrize(
    ("num_walks", "has_requests", "max_seconds", "is_collected"),
    [(1, False, 600.0, True), (1, True, 600.0, False), (0, False, 600.0, False), (1, True, 0.0, True)],
    ids=["idle", "busy", "nothing new", "overdue"],
)
def test_everything_is_walked_through_when_nobody_has_a_request(
    monkeypatch, cycle, num_walks, has_requests, max_seconds, is_collected
):
    monkeypatch.setattr(garbage, "MAX_SECONDS", max_seconds)
    monkeypatch.setattr(router_garbage, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, num_walks))

    async def main():
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, stop.set)
        await router_garbage.collect_when_idle(lambda: has_requests, stop)

    asyncio.run(main())
    assert (cycle() is None) is is_collected


def test_what_is_loaded_is_not_walked_through_again():
    program = (
        "import gc; from router.garbage import leave_to_router;"
        "loaded = [[] for _ in range(1000)]; leave_to_router();"
        "print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000, gc.get_threshold()[2] > 10**9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True True True\n"
