"""What a router does before it connects again to a worker that has refused it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from common.server import ServiceServer
from fissile.channel import aio_channel
from router.config import RouterSettings
from router.fleet.preparation import Preparation
from router.model.tokenizer import TokenizerStore
from tests.fakes import tokenizer as toys
from tests.fakes.worker import FakeWorker, counts

LONG = 30.0


class Loading(FakeWorker):
    """Counts who asks for its tokenizer."""

    num_asked = 0

    async def GetTokenizer(self, request, context):
        self.num_asked += 1
        async for part in super().GetTokenizer(request, context):
            yield part


def prepare(address: str, act: Callable[[Preparation], Awaitable[None]]) -> Awaitable[None]:
    return act(Preparation(address, TokenizerStore(ThreadPoolExecutor(1)), RouterSettings(), None))


def seconds_of_pause(seconds: float, *, serving: bool) -> float:
    async def measured() -> float:
        server = ServiceServer("a.Service")
        port = await server.start("127.0.0.1", 0)
        await server.set_serving(serving)
        begin = time.monotonic()
        await prepare(f"127.0.0.1:{port}", lambda preparation: preparation.pause(seconds))
        duration = time.monotonic() - begin
        await server.close(0)
        return duration

    return asyncio.run(measured())


def test_the_pause_ends_when_the_worker_serves_and_its_tokenizer_is_there_by_then() -> None:
    worker = Loading(counts(3))

    async def scenario() -> None:
        await worker.start(serving=False)
        await prepare(worker.address, of_worker)
        await worker.kill()

    async def of_worker(preparation: Preparation) -> None:
        pause = asyncio.create_task(preparation.pause(LONG))
        while preparation._ahead is None:
            await asyncio.sleep(0.01)
        ahead = preparation._ahead
        async with asyncio.timeout(LONG / 2):
            while not pause.done():  # a watch that begins late sees the next turn
                for serving in (False, True):
                    await worker.service.set_serving(serving)
                    await asyncio.sleep(0.05)
            await pause
        async with aio_channel(worker.address) as channel:
            found = await preparation.tokenizer(preparation.stub(channel), toys.fingerprint(worker.files))
        assert found is ahead
        assert worker.num_asked == 1

    asyncio.run(scenario())


def test_the_pause_lasts_where_nothing_changes() -> None:
    """Of one that serves already, or not yet, and has no tokenizer to tell of."""
    assert seconds_of_pause(0.3, serving=True) >= 0.3
    assert seconds_of_pause(0.3, serving=False) >= 0.3


def test_the_pause_lasts_where_nobody_can_be_asked() -> None:
    begin = time.monotonic()
    asyncio.run(prepare("127.0.0.1:1", lambda preparation: preparation.pause(0.3)))
    assert time.monotonic() - begin >= 0.3
