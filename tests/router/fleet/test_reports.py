"""Statistics of many workers: others go on while they are put together."""

import asyncio
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from router.fleet.health.breaker import Breaker
from router.fleet.reports import stats
from router.latency import LatencyWindows
from router.metrics import RouterMetrics


def link(number):
    latency = LatencyWindows()
    for value in range(1, 200):
        latency.ttft.observe(value / 1000)
    return SimpleNamespace(
        address=f"w:{number:03}",
        latency=latency,
        is_available=True,
        is_retired=False,
        is_ending=False,
        detail="",
        breaker=Breaker("w"),
        info=None,
        num_open_requests=0,
        load=SimpleNamespace(last_report=None),
    )


def test_the_loop_turns_between_two_workers():
    async def scenario():
        num_turns = 0
        is_over = False

        async def other():
            nonlocal num_turns
            while not is_over:
                num_turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(other())
        links = [link(number) for number in range(50)]
        answer = await stats(RouterMetrics(CollectorRegistry()), links, 0, 0, 3600.0)
        is_over = True
        await turning
        return num_turns, answer

    num_turns, answer = asyncio.run(scenario())
    assert num_turns >= 50
    assert [worker.ttft.count for worker in answer.workers] == [199] * 50
    assert [worker.address for worker in answer.workers] == [f"w:{number:03}" for number in range(50)]
