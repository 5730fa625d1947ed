"""Large requests of one client hold up nobody: neither small ones, nor large ones of another client."""

import asyncio

from fissile.v1 import GenerateRequest, GenerationOptions
from router.admission.ration import Ration
from router.admission.turns import LARGE_BYTES, SMALL, Turns
from tests.fakes.system import error_of, run_system
from tests.fakes.worker import FakeWorker, counts


async def work(turns, order, client, num_bytes):
    async with turns.turn(client, num_bytes):
        order.append(client)
        await asyncio.sleep(0.001)


def test_clients_take_turns_at_large_requests():
    async def scenario():
        turns, order = Turns(2, Ration()), []
        flood = [work(turns, order, "flood", LARGE_BYTES) for _ in range(5)]
        await asyncio.gather(*flood, work(turns, order, "other", LARGE_BYTES), work(turns, order, "other", LARGE_BYTES))
        return order

    assert asyncio.run(scenario()) == ["flood", "other", "flood", "other", "flood", "flood", "flood"]


def test_clients_take_turns_at_small_requests():
    async def scenario():
        turns, order = Turns(2, Ration()), []
        flood = [work(turns, order, "flood", 10) for _ in range(10 * SMALL)]
        await asyncio.gather(*flood, work(turns, order, "other", 10))
        return order

    assert asyncio.run(scenario()).index("other") == SMALL


def test_small_requests_do_not_wait_for_large_ones():
    """20 texts of 4 MB held up all others for 11 to 21 seconds."""

    async def scenario(system):
        text = "What does it cost? " * 20_000
        refused = [asyncio.ensure_future(error_of(system.ask(GenerateRequest(text=text)))) for _ in range(20)]
        await asyncio.sleep(0.05)
        answer = await system.ask(GenerateRequest(text="a", options=GenerationOptions(max_tokens=3)))
        num_done = sum(future.done() for future in refused)
        for future in refused:
            future.cancel()
        await asyncio.gather(*refused, return_exceptions=True)
        await system.quiet()
        return answer.usage.num_completion_tokens, num_done, system.router.api.admission.turns._small._num_free

    num_tokens, num_done, num_free = run_system(scenario, FakeWorker(counts(10), max_model_len=100))
    assert (num_tokens, num_free) == (3, SMALL)
    assert num_done < 20
