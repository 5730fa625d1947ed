"""Large requests of one client hold up nobody: neither small ones, nor large ones of another client."""

import asyncio
from collections import Counter

from fissile.v1 import GenerateRequest, GenerationOptions, Prompt
from router import api
from router.admission.ration import Ration
from router.admission.turns import LARGE_BYTES, SMALL, Turns
from router.answering.request import OpenRequest
from tests.fakes.system import error_of, run_system, until
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

    # Behind those at most that had a place before it came.
    assert asyncio.run(scenario()).index("other") <= SMALL


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
        return answer.usage.num_completion_tokens, num_done, system.router.parts.admission.turns._small._num_free

    num_tokens, num_done, num_free = run_system(scenario, FakeWorker(counts(10), max_model_len=100))
    assert (num_tokens, num_free) == (3, SMALL)
    assert num_done < 20


def test_many_completions_of_one_request_are_opened_and_sent_over_many_turns_of_the_loop(monkeypatch):
    opened, sent = Counter(), Counter()
    put_on = OpenRequest.put_on

    async def scenario(system):
        turn = 0

        def next_turn():
            nonlocal turn
            turn += 1
            asyncio.get_running_loop().call_soon(next_turn)

        def open_request(spec, *arguments):
            opened[turn] += spec.n
            return OpenRequest(spec, *arguments)

        def counted_put_on(request, *arguments, **options):
            sent[turn] += request.spec.n
            put_on(request, *arguments, **options)

        monkeypatch.setattr(api, "OpenRequest", open_request)
        monkeypatch.setattr(OpenRequest, "put_on", counted_put_on)
        next_turn()
        options = GenerationOptions(n=128, max_tokens=1)
        call = system.stub.Generate(GenerateRequest(prompts=[Prompt(text="a")] * 64, options=options))
        await until(lambda: sent.total() == 64 * 128)
        call.cancel()
        await system.quiet()

    run_system(scenario, FakeWorker(counts(1)))
    assert opened.total() == 64 * 128
    assert max(opened.values()) <= 128
    assert max(sent.values()) <= 128
