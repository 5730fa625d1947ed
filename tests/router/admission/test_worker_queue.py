"""Who goes next where workers have no room, who gives way, and who is told at once that it will not be in time."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import grpc
import pytest

from fissile.errors import ResourceExhaustedError
from fissile.v1 import GenerateRequest, GenerationOptions, GenerationServiceStub, WorkerLoad
from router.admission.ration import UNITS_PER_TURN, Ration
from router.admission.worker_queue import Waiting, WorkerQueue
from tests.fakes.asked import MAX_NUM_SEQS
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts


class Rig:
    """A queue over workers with `room`, on a clock of its own."""

    def __init__(self, room=0, max_queued=100):
        self.time, self.room = 0.0, room
        self.queue = WorkerQueue(max_queued, Ration(), lambda: self.time)
        self.gone, self.failed, self.places = [], [], {}

    def enter(self, name, client, *, cost=1.0, priority=0, time_left=None, key="model", units=0.01):
        def go():
            self.room -= 1
            self.gone.append(name)

        waiting = Waiting(lambda: self.room > 0, go, lambda error: self.failed.append(name), units)
        self.places[name] = self.queue.enter(key, client, waiting, cost=cost, priority=priority, time_left=time_left)

    def leave(self, name, cost=1.0):
        self.room += 1
        self.queue.leave(self.places.pop(name), cost)


def run(scenario, **options):
    async def inside():
        rig = Rig(**options)
        scenario(rig)
        return rig

    return asyncio.run(inside())


def test_who_finds_room_goes_and_clients_take_turns_for_the_rest():
    def scenario(rig):
        for number in range(4):
            rig.enter(f"f{number}", "flood")
        rig.enter("o0", "other")
        rig.enter("o1", "other")
        for name in ("f0", "o0", "f1", "o1"):
            rig.leave(name)

    rig = run(scenario, room=1)
    assert rig.gone == ["f0", "o0", "f1", "o1", "f2"]
    assert len(rig.queue) == 1


def test_room_for_many_at_once_is_taken_over_many_turns_of_the_loop():
    """64 groups of 128 sequences held it for 0.1 s."""

    async def inside():
        rig = Rig(room=0)
        for number in range(20):
            rig.enter(f"f{number}", "flood", units=UNITS_PER_TURN)
        rig.enter("o0", "other", units=UNITS_PER_TURN)
        rig.room = 21
        seen = [0]
        async with asyncio.timeout(20):
            while len(rig.gone) < 21:
                await asyncio.sleep(0)
                seen.append(len(rig.gone))
        return rig, max(after - before for before, after in pairwise(seen))

    rig, most = asyncio.run(inside())
    assert most == 1
    assert rig.gone == ["f0", "o0", *(f"f{number}" for number in range(1, 20))]


def test_a_client_pays_for_what_its_answers_were():
    def scenario(rig):
        rig.enter("long", "a")
        for number in range(3):
            rig.enter(f"a{number}", "a")
            rig.enter(f"b{number}", "b")
        rig.leave("long", cost=3.5)
        for name in ("b0", "b1", "b2"):
            rig.leave(name)

    assert run(scenario, room=1).gone == ["long", "b0", "b1", "b2", "a0"]


def test_in_a_full_queue_the_longest_line_gives_way_and_its_own_client_is_refused():
    def scenario(rig):
        for number in range(4):
            rig.enter(f"f{number}", "flood", priority=number % 2)
        rig.enter("o0", "other", key="another model")
        with pytest.raises(ResourceExhaustedError, match=r"4 requests wait, 3 .*max-queued-requests") as refused:
            rig.enter("f4", "flood")
        assert refused.value.retry_after == 1.0
        rig.enter("o1", "other")
        with pytest.raises(ResourceExhaustedError):
            rig.enter("o2", "other")

    rig = run(scenario, max_queued=4)
    assert rig.failed == ["f3", "f1"]


def test_a_deadline_that_the_queue_cannot_meet_is_refused_at_once():
    def scenario(rig):
        for number in range(30):
            rig.enter(number, "a", time_left=0.001)  # nobody knows yet how fast it goes
        for _ in range(10):
            rig.time += 1.0
            rig.room = 1
            rig.queue._advance_line(rig.queue._lines["model"])
        with pytest.raises(ResourceExhaustedError, match=r"deadline is in 5.0 s.* takes 18.0 s") as refused:
            rig.enter("late", "a", time_left=5.0)
        assert refused.value.retry_after == 18.0
        rig.enter("in time", "a", time_left=19.0)
        rig.enter("of another client", "b", time_left=5.0)

    assert run(scenario).gone == list(range(10))


def test_who_leaves_the_queue_is_forgotten():
    def scenario(rig):
        rig.enter("a", "a")
        rig.enter("b", "b")
        rig.leave("a")
        rig.queue._advance()

    rig = run(scenario)
    assert (rig.gone, len(rig.queue)) == (["b"], 0)


def ask(**options):
    return GenerateRequest(text="a", options=GenerationOptions(max_tokens=2, **options))


def test_requests_wait_here_while_workers_have_others_waiting():
    """They are heard of all the same: heartbeats, deadlines, and clients that go."""
    worker = FakeWorker(counts(2), others=WorkerLoad(num_waiting=500))

    async def scenario(system):
        (link,) = system.router.parts.workers.links.values()
        await until(lambda: not link.load.has_room)
        beating = ask()
        beating.options.output.heartbeat.FromMilliseconds(20)
        call = system.stub.Generate(beating)
        heartbeat = await call.read()
        late = await error_of(system.ask(ask(), timeout=0.2))
        gone = system.stub.Generate(ask())
        await until(lambda: len(system.router.parts.admission.queue) == 2)
        gone.cancel()
        await until(lambda: len(system.router.parts.admission.queue) == 1)
        num_received = len(worker.received)
        worker.others = WorkerLoad()
        rest = await collect(call)
        await system.quiet()
        return SimpleNamespace(heartbeat=heartbeat, late=late.code, num_received=num_received, rest=rest)

    seen = run_system(scenario, worker)
    assert not seen.heartbeat.completions
    assert seen.late == grpc.StatusCode.DEADLINE_EXCEEDED
    assert seen.num_received == 0
    assert seen.rest.usage.num_completion_tokens == 2
    assert len(worker.received) == 1


@pytest.mark.parametrize("is_full", [True, False])
def test_requests_wait_for_a_place_rather_than_for_a_sequence_to_end(is_full):
    """One worker has room for newcomers in its queue, but runs as many as it can; the other has places, and for the
    moment too many that wait for their first token."""
    full = FakeWorker(counts(2), others=WorkerLoad(num_running=MAX_NUM_SEQS - (not is_full)))
    busy = FakeWorker(counts(2), others=WorkerLoad(num_waiting=100))

    async def scenario(system):
        links = system.router.parts.workers.links.values()
        await until(lambda: sum(link.load.has_room for link in links) == 1)
        await until(lambda: sum(link.load.has_place for link in links) == 2 - is_full)
        call = system.stub.Generate(ask())
        await until(lambda: len(system.router.parts.admission.queue) == is_full)
        if is_full:
            busy.others = WorkerLoad()
        await collect(call)
        await system.quiet()

    run_system(scenario, full, busy)
    assert (len(full.received), len(busy.received)) == (not is_full, is_full)


def test_a_flood_of_one_key_waits_behind_another_key(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[keys]]\nname = "{name}"\nsecret = "{name * 16}"\n' for name in "ab"))
    worker = FakeWorker(counts(2), others=WorkerLoad(num_waiting=500))

    async def scenario(system):
        (link,) = system.router.parts.workers.links.values()
        await until(lambda: not link.load.has_room)
        stub = GenerationServiceStub(system.channel)
        calls = [stub.Generate(ask(priority=i), metadata=key("a")) for i in range(50)]
        await until(lambda: len(system.router.parts.admission.queue) == 50)
        calls.append(stub.Generate(ask(priority=100), metadata=key("b")))
        await until(lambda: len(system.router.parts.admission.queue) == 51)
        worker.others = WorkerLoad()
        for call in calls:
            await call.read()
        await system.quiet()
        return [group.priority for group in worker.groups]

    order = run_system(scenario, worker, api_key_file=keys)
    assert order[:3] in ([0, 100, 1], [100, 0, 1])


def key(name):
    return [("authorization", f"Bearer {name * 16}")]
