"""Which commands travel together."""

import asyncio

from fissile.v1 import GenerateRequest, GenerationOptions, SequenceGroup
from router.fleet.outbox import Outbox
from tests.fakes.system import run_system, until
from tests.fakes.worker import FakeWorker, counts


def ids(batches):
    return [[command.group.request_id for command in batch] for batch in batches]


def test_what_comes_a_little_later_is_taken_too_where_commands_gather():
    async def taken(*, gathers):
        outbox = Outbox()
        outbox.start(SequenceGroup(request_id="a"), 1)
        taking = asyncio.create_task(outbox.take(gathers=gathers))
        for _ in range(3):
            await asyncio.sleep(0)
        outbox.start(SequenceGroup(request_id="b"), 1)
        return ids(await taking)

    assert asyncio.run(taken(gathers=False)) == [["a"]]
    assert asyncio.run(taken(gathers=True)) == [["a", "b"]]


def test_requests_of_a_burst_share_messages_once_the_worker_has_enough(monkeypatch):
    monkeypatch.setattr("router.fleet.outbox.GATHER_SECONDS", 0.2)
    worker = FakeWorker(counts(2), step_seconds=0.3)

    async def scenario(system):
        calls = [
            system.stub.Generate(GenerateRequest(text="a", options=GenerationOptions(max_tokens=2))) for _ in range(60)
        ]
        await until(lambda: len(worker.received) == 60)
        for call in calls:
            call.cancel()

    run_system(scenario, worker)
    assert [asked.id for asked in worker.received] == list(range(1, 61))
    assert max(worker.batches) > 4
