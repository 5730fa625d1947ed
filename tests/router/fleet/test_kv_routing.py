"""Routers over workers whose cache is real and whose device is not: what one router learns, the other knows, too."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from common.block_hash import HASH_SCHEME, hash_chain
from fissile.channel import aio_channel
from fissile.v1 import (
    ClearPrefixCacheRequest,
    DrainRequest,
    GenerateRequest,
    GenerationOptions,
    GenerationServiceStub,
    KvBlocksStored,
    KvCacheCleared,
    KvEvent,
    TokenSequence,
    WatchKvEventsResponse,
    WorkerServiceStub,
)
from router.config import RouterSettings
from router.fleet.prefixes.index import View
from router.server import RouterServer
from tests.fakes import tokenizer as toys
from tests.fakes.system import QUICK, collect, run_system, until
from tests.fakes.worker import FakeWorker, says
from tests.worker.fake_executor import FakeExecutor
from tests.worker.harness import _with_callback
from worker.config import WorkerSettings
from worker.face.served_files import ServedFiles
from worker.loader.tokenizer import TokenizerFiles
from worker.server import WorkerServer

PREFIX = [11 + i % 80 for i in range(320)]
FILES = ServedFiles(TokenizerFiles(toys.files(toys.byte_level())), model_fingerprint="f1")


@dataclass
class Fleet:
    workers: list[WorkerServer]
    routers: list[RouterServer]
    stubs: list[GenerationServiceStub]
    """Of the routers."""
    controls: list[WorkerServiceStub]
    """Of the workers."""

    async def ask(self, router: int, tokens: list[int], **options) -> int:
        """Prompt tokens that were cached."""
        options = GenerationOptions(max_tokens=2, ignore_eos=True, **options)
        request = GenerateRequest(tokens=TokenSequence(token_ids=tokens), options=options)
        return (await collect(self.stubs[router].Generate(request))).usage.num_cached_tokens

    def known(self, router: int) -> list[int]:
        """Blocks by worker; -1: there is no view of it."""
        views = [self.view(router, number) for number in range(len(self.workers))]
        return [-1 if view is None else len(view) for view in views]

    def view(self, router: int, worker: int) -> View | None:
        link = self.routers[router].parts.workers.links[f"127.0.0.1:{self.workers[worker].port}"]
        known = self.routers[router].parts.prefixes._known.get(link.session)
        return known.view if known else None

    async def learnt(self, *chains: list[int]) -> None:
        """Every router knows a worker that has these blocks."""
        for router in self.routers:
            index = router.parts.prefixes.index
            await until(lambda index=index: all(len(c) in index.match(c).values() for c in chains))


async def start_worker(port: int = 0, block_size: int = 16, num_blocks: int = 256, model: str = "m") -> WorkerServer:
    config = WorkerSettings(
        host="127.0.0.1", port=port, max_num_batched_tokens=2048, block_size=block_size, served_model_name=model
    )
    executor = FakeExecutor(num_blocks=num_blocks, block_size=block_size, max_model_len=1024)
    worker = WorkerServer(config, partial(_with_callback, executor), lambda: FILES)
    await worker.listen()
    await worker.load()
    return worker


def run_fleet(
    scenario, num_workers=2, num_routers=2, num_blocks=256, block_sizes=(16, 16), models=("m", "m"), **settings
):
    async def run():
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            fleet = Fleet([], [], [], [])
            for block_size, model in zip(block_sizes[:num_workers], models, strict=False):
                worker = await start_worker(block_size=block_size, num_blocks=num_blocks, model=model)
                number = len(fleet.workers)
                fleet.workers.append(worker)
                stack.push_async_callback(lambda number=number: fleet.workers[number].stop())
                channel = await stack.enter_async_context(aio_channel(f"127.0.0.1:{worker.port}"))
                fleet.controls.append(WorkerServiceStub(channel))
            addresses = [f"127.0.0.1:{worker.port}" for worker in fleet.workers]
            for _ in range(num_routers):
                router = RouterServer(RouterSettings(**{**QUICK, "policy": "prefix", "workers": addresses, **settings}))
                stack.push_async_callback(router.stop)
                port = await router.start()
                fleet.routers.append(router)
                links = router.parts.workers.links
                await until(lambda links=links: sum(link.is_available for link in links.values()) == num_workers)
                channel = await stack.enter_async_context(aio_channel(f"127.0.0.1:{port}"))
                fleet.stubs.append(GenerationServiceStub(channel))
            return await scenario(fleet)

    return asyncio.run(run())


def test_what_one_router_sent_the_other_one_finds():
    async def scenario(fleet):
        await fleet.ask(0, PREFIX)
        await fleet.learnt(hash_chain(PREFIX, 16))
        again = [await fleet.ask(1, [*PREFIX, 20 + i]) for i in range(4)]
        before = sum(fleet.known(0))
        salted = await fleet.ask(1, PREFIX, cache_salt=b"tenant")
        await until(lambda: sum(fleet.known(0)) == before + 20)
        return again, salted, await fleet.ask(0, PREFIX, cache_salt=b"tenant")

    assert run_fleet(scenario) == ([320] * 4, 0, 304)


def test_a_cache_that_is_cleared_is_forgotten_and_a_worker_that_drains_too():
    async def scenario(fleet):
        await fleet.ask(0, PREFIX)
        await fleet.learnt(hash_chain(PREFIX, 16))
        for control in fleet.controls:
            await control.ClearPrefixCache(ClearPrefixCacheRequest())
        await until(lambda: fleet.known(0) == fleet.known(1) == [0, 0])
        await fleet.ask(0, PREFIX)
        await fleet.learnt(hash_chain(PREFIX, 16))
        holder = fleet.known(1).index(max(fleet.known(1)))
        await fleet.controls[holder].Drain(DrainRequest())
        await until(lambda: fleet.known(0)[holder] == fleet.known(1)[holder] == -1)
        return [router.parts.prefixes.index.match(hash_chain(PREFIX, 16)) for router in fleet.routers]

    assert run_fleet(scenario) == [{}, {}]


def test_models_of_different_block_sizes_have_views_of_their_own():
    async def scenario(fleet):
        for model in ("m", "k"):
            options = GenerationOptions(max_tokens=2, ignore_eos=True)
            prompt = TokenSequence(token_ids=PREFIX)
            await collect(fleet.stubs[0].Generate(GenerateRequest(model=model, tokens=prompt, options=options)))
        await fleet.learnt(hash_chain(PREFIX, 16), hash_chain(PREFIX, 32))
        index = fleet.routers[0].parts.prefixes.index
        return [sorted(index.match(hash_chain(PREFIX, size)).values()) for size in (16, 32)]

    assert run_fleet(scenario, num_routers=1, block_sizes=(16, 32), models=("m", "k")) == [[20], [10]]


def test_nobody_is_subscribed_to_where_history_is_asked_for():
    async def scenario(fleet):
        cached = [await fleet.ask(0, [*PREFIX, 20 + i]) for i in range(4)]
        return cached, [router.parts._follower._feeds for router in fleet.routers]

    assert run_fleet(scenario, num_routers=1, policy="prefix_history") == ([0, 320, 320, 320], [{}])


def test_a_view_is_what_the_worker_has_through_evictions():
    """Prompts of three beginnings, through caches of a few of them."""

    async def scenario(fleet):
        rng = random.Random(5)
        beginnings = [[rng.randrange(11, 99) for _ in range(48)] for _ in range(3)]
        for _ in range(40):
            own = [rng.randrange(11, 99) for _ in range(rng.randrange(1, 90))]
            salt = rng.choice([b"", b"tenant"])
            await fleet.ask(rng.randrange(2), rng.choice(beginnings) + own, cache_salt=salt)
        for number, worker in enumerate(fleet.workers):
            _, blocks = await asyncio.wrap_future(worker._engine.call(lambda s: s.watch_kv_events().snapshot()))
            hashes = {block.hash for block in blocks}
            assert len(hashes) > 5
            for view in [fleet.view(router, number) for router in range(2)]:
                await until(lambda view=view, hashes=hashes: view._blocks.keys() == hashes)

    run_fleet(scenario, num_blocks=24)


def test_a_worker_restarted_at_its_address_is_asked_again():
    async def scenario(fleet):
        await until(lambda: fleet.known(0) == [1, 1])
        await fleet.ask(0, PREFIX)
        await fleet.learnt(hash_chain(PREFIX, 16))
        holder = fleet.known(0).index(max(fleet.known(0)))
        port = fleet.workers[holder].port
        await fleet.workers[holder].stop()
        await until(lambda: fleet.known(0)[holder] == -1)
        fleet.workers[holder] = await start_worker(port=port)
        await until(lambda: fleet.known(0) == [1, 1])
        return await fleet.ask(0, PREFIX)

    assert run_fleet(scenario, num_routers=1) == 0


def test_a_lone_worker_is_asked_once_there_is_another_one():
    """Each has a block of its warm-up, of which only events tell."""

    async def scenario(fleet):
        ports = [worker.port for worker in fleet.workers]
        for worker in fleet.workers:
            await worker.stop()
        await until(lambda: fleet.known(0) == [-1, -1])
        fleet.workers[0] = await start_worker(port=ports[0])
        await until(lambda: fleet.known(0) == [0, -1])
        cached = [await fleet.ask(0, PREFIX) for _ in range(2)]
        alone = fleet.known(0)
        fleet.workers[1] = await start_worker(port=ports[1])
        await until(lambda: fleet.known(0) == [21, 1])
        return cached, alone

    assert run_fleet(scenario, num_routers=1) == ([0, 304], [20, -1])


class Forgetful(FakeWorker):
    """Its second message of KV events is not the one that follows the first."""

    num_watches = 0

    async def WatchKvEvents(self, request, context):
        await context.send_initial_metadata(())
        self.num_watches += 1
        snapshot = [KvEvent(cleared=KvCacheCleared()), stored(1, 2)]
        yield WatchKvEventsResponse(sequence_number=5, events=snapshot, is_snapshot=True, epoch=self.epoch)
        number = 7 if self.num_watches == 1 else 6
        yield WatchKvEventsResponse(sequence_number=number, events=[stored(3)], epoch=self.epoch)
        await asyncio.Event().wait()

    async def GetWorker(self, request, context):
        info = await super().GetWorker(request, context)
        info.hash_scheme, info.block_size = HASH_SCHEME, 16
        return info


def stored(*hashes):
    return KvEvent(stored=KvBlocksStored(block_hashes=hashes))


def test_after_a_gap_the_snapshot_is_asked_for_again(monkeypatch):
    monkeypatch.setattr("router.fleet.prefixes.following.RETRY_SECONDS", 0.01)
    worker, other = Forgetful(says("ok"), capabilities=["kv_events"]), FakeWorker(says("ok"))

    async def scenario(system):
        index = system.router.parts.prefixes.index
        await until(lambda: worker.num_watches == 2 and index.num_blocks == 3)
        return list(index.match([1, 2, 3, 4]).values())

    assert run_system(scenario, worker, other, policy="prefix") == [3]
    assert worker.num_watches == 2
