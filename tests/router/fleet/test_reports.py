"""Statistics of many workers: others go on while they are put together."""

import asyncio
from functools import partial
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from router.admission.ration import UNITS_PER_TURN, Ration
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


def test_workers_are_looked_at_over_many_turns_of_the_loop_however_many_ask():
    async def scenario():
        num_turns = 0
        is_over = False

        async def other():
            nonlocal num_turns
            while not is_over:
                num_turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(other())
        links, ration = [link(number) for number in range(50)], Ration()
        metrics = RouterMetrics(CollectorRegistry())
        answers = await asyncio.gather(
            *(stats(metrics, links, 0, 0, 3600.0, partial(ration.granted, "a", 1.0)) for _ in range(8))
        )
        is_over = True
        await turning
        return num_turns, answers

    num_turns, answers = asyncio.run(scenario())
    assert num_turns >= 8 * 51 // UNITS_PER_TURN
    for answer in answers:
        assert [worker.ttft.count for worker in answer.workers] == [199] * 50
        assert [worker.address for worker in answer.workers] == [f"w:{number:03}" for number in range(50)]
