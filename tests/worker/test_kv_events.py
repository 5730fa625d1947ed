"""WatchKvEvents: a watcher that follows it knows the prefix cache exactly."""

import asyncio

import grpc
import pytest

from common.block_hash import hash_chain
from fissile.v1 import ClearPrefixCacheRequest, GetWorkerRequest, WatchKvEventsRequest
from tests.worker.harness import expected, run_all, run_worker, sequence, until
from worker.face import kv_watch


class View:
    """What a router would keep: the hashes it believes are cached; checks numbers and chains on the way."""

    def __init__(self, call):
        self.call = call
        self.hashes: dict[int, tuple[int, list[int], bytes]] = {}
        self.number = None
        self.num_snapshots = 0
        self.epoch = ""

    async def follow(self):
        async for response in self.call:
            self.epoch = response.epoch
            if response.is_snapshot:
                self.number = response.sequence_number
                self.num_snapshots += 1
            else:
                assert response.sequence_number == self.number + 1, "a gap"
                self.number += len(response.events)
            for event in response.events:
                self.apply(event)

    def apply(self, event):
        if event.HasField("cleared"):
            self.hashes.clear()
        for hash in event.removed.block_hashes:
            del self.hashes[hash]
        parent, stored = event.stored.parent_hash, event.stored
        for i, hash in enumerate(stored.block_hashes):
            tokens = list(stored.token_ids[i * stored.block_size : (i + 1) * stored.block_size])
            assert len(tokens) == stored.block_size
            assert parent == 0 or parent in self.hashes
            self.hashes[hash] = (parent, tokens, stored.cache_salt if i == 0 else b"")
            parent = hash


def watch(system, number=0):
    view = View(system.stub.WatchKvEvents(WatchKvEventsRequest(from_sequence_number=number)))
    return view, asyncio.create_task(view.follow())


@pytest.mark.parametrize("prefix_index", ["hash", "radix"])
def test_snapshot_then_changes(prefix_index):
    first, second = sequence(1, list(range(20, 57)), max_tokens=12), sequence(2, 40, cache_salt=b"tenant")
    chains = [
        hash_chain((list(first.prompt_token_ids) + expected(first, 12))[:-1], 16),
        hash_chain(second.prompt_token_ids, 16, b"tenant"),
    ]

    async def scenario(system):
        await run_all(system, first)
        view, following = watch(system)
        await until(lambda: view.num_snapshots == 1)
        seen = set(view.hashes)
        await run_all(system, second)
        await until(lambda: len(view.hashes) >= len(chains[0]) + len(chains[1]) + 1)
        cached = dict(view.hashes)
        await system.stub.ClearPrefixCache(ClearPrefixCacheRequest())
        await until(lambda: not view.hashes)
        epoch = (await system.stub.GetWorker(GetWorkerRequest())).epoch
        view.call.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return seen, cached, view, epoch

    seen, cached, view, epoch = run_worker(scenario, prefix_index=prefix_index)
    # The warm-up request left one block, too.
    assert set(chains[0]) < seen and len(seen) == len(chains[0]) + 1
    assert set(cached) == seen | set(chains[1])
    assert [cached[hash][1] for hash in chains[1]] == [
        list(second.prompt_token_ids[:16]),
        list(second.prompt_token_ids[16:32]),
    ]
    assert [cached[hash][2] for hash in chains[1]] == [b"tenant", b""]
    assert (view.num_snapshots, view.epoch) == (1, epoch)


def test_evictions_are_told():
    async def scenario(system):
        view, following = watch(system)
        await until(lambda: view.num_snapshots == 1)
        messages = [sequence(id, 33, max_tokens=2) for id in range(1, 9)]
        for message in messages:
            await run_all(system, message)
        newest = set(hash_chain(messages[-1].prompt_token_ids, 16))
        await until(lambda: newest <= view.hashes.keys())
        load = await asyncio.wrap_future(system.server._engine.call(lambda s: s.load()))
        view.call.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return len(view.hashes), load.num_cached_blocks

    num_seen, num_cached = run_worker(scenario, num_blocks=5)
    assert num_seen == num_cached <= 5


def test_a_watcher_goes_on_where_it_was():
    async def scenario(system):
        view, following = watch(system)
        await until(lambda: view.num_snapshots == 1)
        await run_all(system, sequence(1, 40))
        await until(lambda: view.number == 2)
        view.call.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await run_all(system, sequence(2, 40))
        again = View(system.stub.WatchKvEvents(WatchKvEventsRequest(from_sequence_number=2)))
        again.number, again.hashes = view.number, dict(view.hashes)
        following = asyncio.create_task(again.follow())
        await until(lambda: again.number == 4)
        again.call.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return again.num_snapshots, len(again.hashes)

    assert run_worker(scenario) == (0, 5)


def test_a_watcher_too_far_behind_gets_a_snapshot(monkeypatch):
    monkeypatch.setattr("worker.face.kv_watch.EVENT_CAPACITY", 3)

    async def scenario(system):
        view, following = watch(system)
        await until(lambda: view.num_snapshots == 1)
        view.call.cancel()
        await asyncio.gather(following, return_exceptions=True)
        for id in range(1, 4):
            await run_all(system, sequence(id, 40))
        answers = []
        for number in (1, 999):
            again, following = watch(system, number)
            await until(lambda again=again: again.num_snapshots == 1)
            answers.append((again.number, len(again.hashes)))
            again.call.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return answers

    assert run_worker(scenario) == [(6, 7), (6, 7)]


async def ask_in_vain(system):
    """How a watcher is refused, and what the worker says that it can do."""
    call = system.stub.WatchKvEvents(WatchKvEventsRequest())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    worker = await system.stub.GetWorker(GetWorkerRequest())
    return refused.value.code().name, list(worker.capabilities)


def test_without_prefix_caching_there_is_nothing_to_watch():
    assert run_worker(ask_in_vain, enable_prefix_caching=False) == ("UNIMPLEMENTED", ["beam_search"])


def test_a_model_with_state_has_prefix_caching_where_states_are_kept():
    async def scenario(system):
        return list((await system.stub.GetWorker(GetWorkerRequest())).capabilities)

    settings = {"num_groups": 4, "num_checkpoints": 2, "max_num_seqs": 4}
    assert run_worker(scenario, **settings) == ["beam_search", "prefix_caching", "kv_events"]


def test_a_model_with_state_is_served_without_prefix_caching_where_none_is_kept(caplog):
    caplog.set_level("INFO")
    assert run_worker(ask_in_vain, num_groups=4, max_num_seqs=4) == ("UNIMPLEMENTED", ["beam_search"])
    assert "prefix caching is off: the state of this model's requests is not checkpointed" in caplog.messages


def test_steps_that_follow_each_other_are_not_each_looked_at(monkeypatch):
    looks = []
    monkeypatch.setattr("worker.face.service.min_interval", lambda device: 3600.0)
    monkeypatch.setattr(kv_watch, "_since", lambda number, scheduler: looks.append(number) or [])

    async def scenario(system):
        _, follower = watch(system)
        await until(lambda: len(looks) == 1)
        await run_all(system, sequence(1, max_tokens=20))
        follower.cancel()

    run_worker(scenario)
    assert len(looks) == 1


def test_where_the_model_has_the_same_cores_looks_are_rarer():
    assert kv_watch.min_interval("cpu") > kv_watch.min_interval("cuda:0") == kv_watch.MIN_INTERVAL_SECONDS
