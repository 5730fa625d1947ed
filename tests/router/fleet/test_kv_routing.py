"""Routers over workers whose cache is real and whose device is not: what one router learns, the other knows, too."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from common.block_hash import hash_chain
from fissile.channel import aio_channel
from fissile.v1 import (
    ClearPrefixCacheRequest,
    DrainRequest,
    GenerateRequest,
    GenerationOptions,
    GenerationServiceStub,
    TokenSequence,
    WorkerServiceStub,
)
from router.config import RouterSettings
from router.server import RouterServer
from tests.fakes import tokenizer as toys
from tests.fakes.system import QUICK, collect, until
from tests.worker.fake_executor import FakeExecutor
from tests.worker.harness import _with_callback
from worker.config import WorkerSettings
from worker.loader.tokenizer import TokenizerFiles
from worker.served_files import ServedFiles
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
        """Blocks by worker."""
        known = self.routers[router].prefixes._known
        return [len(known[s].view) if s in known else -1 for s in self._sessions(router)]

    def _sessions(self, router: int) -> list[tuple[str, int]]:
        links = self.routers[router].workers.links
        return [links[f"127.0.0.1:{worker.port}"].session for worker in self.workers]

    async def learnt(self, *chains: list[int]) -> None:
        """Every router knows a worker that has these blocks."""
        for router in self.routers:
            index = router.prefixes.index
            await until(lambda index=index: all(len(c) in index.match(c).values() for c in chains))


def run_fleet(scenario, num_workers=2, num_routers=2, block_sizes=(16, 16), models=("m", "m"), **settings):
    async def run():
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            fleet = Fleet([], [], [], [])
            for block_size, model in zip(block_sizes[:num_workers], models, strict=False):
                config = WorkerSettings(
                    host="127.0.0.1",
                    port=0,
                    max_num_batched_tokens=2048,
                    block_size=block_size,
                    served_model_name=model,
                )
                executor = FakeExecutor(num_blocks=1024 // block_size * 4, block_size=block_size, max_model_len=1024)
                worker = WorkerServer(config, partial(_with_callback, executor), lambda: FILES)
                stack.push_async_callback(worker.stop)
                await worker.listen()
                await worker.load()
                fleet.workers.append(worker)
                channel = await stack.enter_async_context(aio_channel(f"127.0.0.1:{worker.port}"))
                fleet.controls.append(WorkerServiceStub(channel))
            addresses = [f"127.0.0.1:{worker.port}" for worker in fleet.workers]
            for _ in range(num_routers):
                router = RouterServer(RouterSettings(**{**QUICK, "policy": "prefix", "workers": addresses, **settings}))
                stack.push_async_callback(router.stop)
                port = await router.start()
                fleet.routers.append(router)
                await until(
                    lambda router=router: sum(x.is_available for x in router.workers.links.values()) == num_workers
                )
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
        return [router.prefixes.index.match(hash_chain(PREFIX, 16)) for router in fleet.routers]

    assert run_fleet(scenario) == [{}, {}]


def test_models_of_different_block_sizes_have_views_of_their_own():
    async def scenario(fleet):
        for model in ("m", "k"):
            options = GenerationOptions(max_tokens=2, ignore_eos=True)
            prompt = TokenSequence(token_ids=PREFIX)
            await collect(fleet.stubs[0].Generate(GenerateRequest(model=model, tokens=prompt, options=options)))
        await fleet.learnt(hash_chain(PREFIX, 16), hash_chain(PREFIX, 32))
        index = fleet.routers[0].prefixes.index
        return [sorted(index.match(hash_chain(PREFIX, size)).values()) for size in (16, 32)]

    assert run_fleet(scenario, num_routers=1, block_sizes=(16, 32), models=("m", "k")) == [[20], [10]]


def test_nobody_is_subscribed_to_where_history_is_asked_for():
    async def scenario(fleet):
        cached = [await fleet.ask(0, [*PREFIX, 20 + i]) for i in range(4)]
        return cached, [router._follower._feeds for router in fleet.routers]

    assert run_fleet(scenario, num_routers=1, policy="prefix_history") == ([0, 320, 320, 320], [{}])
