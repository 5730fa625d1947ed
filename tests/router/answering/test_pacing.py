"""Streams take turns above the rate; first and last messages, and everything below it, do not wait."""

import asyncio

from fissile.v1 import FinishReason, GenerateRequest, GenerationOptions, OutputOptions
from router.admission.ration import Ration
from router.answering.pacing import BURST_SECONDS, TICK_SECONDS, News, Pacer
from tests.fakes.system import WAIT_SECONDS, collect, run_system
from tests.fakes.worker import FakeWorker, counts

NEVER = 1e-6
"""A rate at which the next turn does not come within a test."""


def pacer_with_burst(num_messages):
    """Lets so many messages go, and then none."""
    pacer = Pacer(num_messages / BURST_SECONDS, Ration())
    pacer._rate = NEVER
    return pacer


def run(scenario, *args):
    async def main():
        return await scenario(*args)

    return asyncio.run(main())


def test_nothing_waits_below_the_rate_and_the_rest_waits_in_order():
    async def scenario(pacer):
        events = [News("a") for _ in range(5)]
        for event in events:
            pacer.wake_in_turn(event)
        return [e.is_set() for e in events], list(pacer._waiting) == events[3:]

    assert run(scenario, pacer_with_burst(3)) == ([True, True, True, False, False], True)


def test_a_stream_waits_once_however_many_tokens_come():
    async def scenario(pacer):
        first, second = News("a"), News("a")
        pacer.wake_in_turn(first)
        for _ in range(10):
            pacer.wake_in_turn(first)
            pacer.wake_in_turn(second)
        return first.is_set(), second.is_set(), pacer.num_waiting

    assert run(scenario, pacer_with_burst(1)) == (True, False, 1)


def test_who_waits_goes_when_tokens_come_for_whatever_stream():
    async def scenario(pacer):
        first, second, third = News("a"), News("a"), News("a")
        for news in (first, second):
            pacer.wake_in_turn(news)
        waited = second.is_set()
        pacer._allowance = 1
        pacer.wake_in_turn(third)
        return waited, second.is_set(), third.is_set(), list(pacer._waiting) == [third]

    assert run(scenario, pacer_with_burst(1)) == (False, True, False, True)


def test_while_tokens_come_no_timer_serves():
    """They come every 50 ms, and it is put off each time: it would be in between."""

    async def scenario(pacer):
        sent, waiting = News("a"), News("a")
        pacer.wake_in_turn(sent)
        pacer.wake_in_turn(waiting)
        timers = []
        for _ in range(3):
            pacer._came_at -= 0.05
            pacer.wake_in_turn(waiting)
            timers.append(pacer._timer)
        seconds = timers[-1].when() - asyncio.get_running_loop().time()
        return [timer.cancelled() for timer in timers], waiting.is_set(), seconds > 0.06

    assert run(scenario, pacer_with_burst(1)) == ([True, True, False], False, True)


def test_who_waits_is_served_soon_where_tokens_come_seldom():
    async def scenario(pacer):
        pacer._came_at -= 3.0
        pacer.wake_in_turn(News("a"))
        return pacer._wait_seconds

    assert run(scenario, pacer_with_burst(1)) == TICK_SECONDS


def test_an_urgent_message_goes_out_of_turn_and_is_counted():
    async def scenario(pacer):
        urgent, late = News("a"), News("a")
        pacer.wake_now(urgent)
        pacer.wake_in_turn(late)
        waited = late.is_set()
        pacer.wake_now(late)
        return urgent.is_set(), waited, late.is_set(), pacer.num_waiting

    assert run(scenario, pacer_with_burst(1)) == (True, False, True, 0)


def test_a_stream_that_is_gone_takes_no_turn():
    async def scenario(pacer):
        gone, other = News("a"), News("a")
        pacer.wake_now(News("a"))
        pacer.wake_in_turn(gone)
        pacer.wake_in_turn(other)
        pacer.forget(gone)
        pacer._rate = 1e9
        await asyncio.wait_for(other.wait(), WAIT_SECONDS)
        return gone.is_set(), pacer._timer

    assert run(scenario, pacer_with_burst(1)) == (False, None)


def test_clients_take_turns_and_not_streams_and_large_messages_count_as_several():
    async def scenario(pacer):
        pacer._allowance = 0
        flood, other = [News("flood") for _ in range(10)], [News("other") for _ in range(3)]
        for news in (*flood, *other):
            pacer.wake_in_turn(news)
        pacer.charge(flood[0], 2)
        pacer._allowance = 4
        pacer._advance()
        await asyncio.sleep(0.01)  # some turns of the loop
        return sum(n.is_set() for n in flood), sum(n.is_set() for n in other)

    assert run(scenario, pacer_with_burst(4)) == (1, 3)


def ask(**output):
    return GenerateRequest(text="hello", options=GenerationOptions(output=OutputOptions(token_ids=True, **output)))


def test_the_first_and_the_last_message_do_not_wait_and_what_is_between_merges():
    worker = FakeWorker(counts(30), mute_after=1)

    async def scenario(system):
        system.router.parts.pacer._allowance = 0
        call = system.stub.Generate(ask())
        first = await call.read()
        worker.mute_after = None
        return first, await collect(call)

    first, rest = run_system(scenario, worker, max_message_rate=NEVER)
    assert len(rest.messages) == 1
    assert [*first.completions[0].token_ids, *rest.tokens[0]] == counts(30)(worker.received[0])


def test_a_heartbeat_carries_what_waits_for_its_turn():
    """A turn that does not come for long must not look like a worker without tokens."""
    worker = FakeWorker(counts(5), mute_after=1)

    async def scenario(system):
        system.router.parts.pacer._allowance = 0
        request = ask()
        request.options.output.heartbeat.FromMilliseconds(50)
        call = system.stub.Generate(request)
        while not (await call.read()).completions:
            pass  # a heartbeat before the first token
        worker.mute_after = 3
        carried = []
        while len(carried) < 2:
            carried += [token for delta in (await call.read()).completions for token in delta.token_ids]
        call.cancel()
        return carried

    carried = run_system(scenario, worker, max_message_rate=NEVER)
    assert carried == counts(5)(worker.received[0])[1:3]


def test_many_fast_streams_share_the_rate_and_lose_nothing():
    worker = FakeWorker(counts(100), step_seconds=0.0)

    async def scenario(system):
        calls = [system.stub.Generate(ask()) for _ in range(16)]
        answers = await asyncio.gather(*map(collect, calls))
        await system.quiet()
        return answers, system.router.parts.pacer.num_waiting

    answers, num_waiting = run_system(scenario, worker, max_message_rate=200)
    assert sorted(a.tokens[0] for a in answers) == sorted(counts(100)(s) for s in worker.received)
    assert {a.finishes[0].reason for a in answers} == {FinishReason.FINISH_REASON_LENGTH}
    assert sum(len(a.messages) for a in answers) < 16 * 100 / 2
    assert num_waiting == 0
