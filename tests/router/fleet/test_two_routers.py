"""Two routers over the same two workers, which are real but for their model."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from fissile.channel import aio_channel
from fissile.v1 import (
    DrainRequest,
    GenerateRequest,
    GenerationOptions,
    GenerationServiceStub,
    GetLoadRequest,
    TokenSequence,
    UndrainRequest,
    WorkerServiceStub,
)
from router.config import RouterSettings
from router.server import RouterServer
from tests.fakes import tokenizer as toys
from tests.fakes.system import QUICK, collect, until
from tests.worker.fake_executor import FakeExecutor
from worker.config import WorkerSettings
from worker.face.served_files import ServedFiles
from worker.loader.tokenizer import TokenizerFiles
from worker.server import WorkerServer

FILES = ServedFiles(TokenizerFiles(toys.files(toys.byte_level())), "weights")


def _executor(executor, on_rank_end):
    executor._on_rank_end = on_rank_end
    return executor


@asynccontextmanager
async def worker():
    """Its server, executor and stub."""
    executor = FakeExecutor()
    settings = WorkerSettings(host="127.0.0.1", port=0, drain_timeout=5.0, max_num_batched_tokens=2048)
    server = WorkerServer(settings, partial(_executor, executor), lambda: FILES)
    await server.listen()
    try:
        await server.load()
        async with aio_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, executor, WorkerServiceStub(channel)
    finally:
        executor.open.set()
        await server.stop()


@asynccontextmanager
async def router(addresses):
    server = RouterServer(RouterSettings(**QUICK, workers=addresses))
    port = await server.start()
    async with aio_channel(f"127.0.0.1:{port}") as channel:
        try:
            await until(lambda: all(link.is_available for link in server.parts.workers.links.values()))
            yield server, GenerationServiceStub(channel)
        finally:
            await server.stop()


async def ask(stub, max_tokens=4):
    options = GenerationOptions(max_tokens=max_tokens, ignore_eos=True)
    request = GenerateRequest(tokens=TokenSequence(token_ids=[7, 8, 9]), options=options)
    return (await collect(stub.Generate(request))).usage.num_completion_tokens


async def generated(stub):
    """Tokens so far."""
    return (await stub.GetLoad(GetLoadRequest())).load.num_generated_tokens


def test_a_worker_that_is_drained_leaves_both_routers_finishes_and_comes_back_to_both():
    async def scenario():
        async with AsyncExitStack() as stack:
            (first, executor, stub), (second, _, _) = [await stack.enter_async_context(worker()) for _ in range(2)]
            addresses = [f"127.0.0.1:{server.port}" for server in (first, second)]
            routers = [await stack.enter_async_context(router(addresses)) for _ in range(2)]
            links = [server.parts.workers.links[addresses[0]] for server, _ in routers]
            executor.open.clear()
            running = [asyncio.create_task(ask(client, 20)) for _, client in routers for _ in range(4)]
            await until(lambda: all(link.num_open_requests for link in links))
            drain = stub.Drain(DrainRequest())
            await until(lambda: not any(link.is_available for link in links))
            executor.open.set()
            answers = await asyncio.gather(*running)
            drained = await drain
            before = await generated(stub)
            answers += await asyncio.gather(*(ask(client) for _, client in routers for _ in range(6)))
            after = await generated(stub)
            await stub.Undrain(UndrainRequest())
            await until(lambda: all(link.is_available for link in links))
            answers += await asyncio.gather(*(ask(client) for _, client in routers for _ in range(6)))
            return answers, drained, after - before, await generated(stub) - after

    answers, drained, while_drained, afterwards = asyncio.run(scenario())
    assert answers == [20] * 8 + [4] * 24
    assert drained.num_aborted == 0 and drained.num_finished >= 2
    assert while_drained == 0 and afterwards > 0
