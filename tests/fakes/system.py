"""A router and fake workers in one event loop, over real sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from fissile.channel import aio_channel
from fissile.errors import FissileError, from_rpc_error
from fissile.tls import ClientTls
from fissile.v1 import CompletionDelta, Finish, GenerateRequest, GenerationServiceStub, RequestTimings, Usage
from router.config import RouterSettings
from router.fleet.discovery.dns import Resolver, resolve_name
from router.server import RouterServer
from tests.fakes.worker import FakeWorker

WAIT_SECONDS = 60
"""Until a test gives up on something that must come."""

QUICK = {
    "host": "127.0.0.1",
    "port": 0,
    "reconnect_backoff": 0.02,
    "load_interval": 0.05,
    "probe_timeout": 0.5,
    "worker_wait": 1.0,
    "drain_timeout": 5.0,
    "policy": "least_loaded",
}
"""Workers that are equal take turns: tests know where requests go."""


Key = int | tuple[int, int]


@dataclass
class Answer:
    """A whole stream, collected. Completions are known by their index, with several prompts by (prompt, index) for all
    prompts but the first."""

    texts: dict[Key, str] = field(default_factory=dict)
    tokens: dict[Key, list[int]] = field(default_factory=dict)
    logprobs: dict[Key, list] = field(default_factory=dict)
    finishes: dict[Key, Finish] = field(default_factory=dict)
    messages: list = field(default_factory=list)
    usage: Usage | None = None
    timings: RequestTimings | None = None

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    def add(self, message) -> None:
        assert self.usage is None, "a message after the last one"
        self.messages.append(message)
        for delta in message.completions:
            prompt = delta.prompt_index if isinstance(delta, CompletionDelta) else 0
            text = delta.text if isinstance(delta, CompletionDelta) else delta.content
            key = (prompt, delta.index) if prompt else delta.index
            self.texts[key] = self.texts.get(key, "") + text
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            self.logprobs.setdefault(key, []).extend(delta.logprobs)
            if delta.HasField("finish"):
                assert key not in self.finishes, "a second finish"
                self.finishes[key] = delta.finish
        if message.HasField("usage"):
            self.usage = message.usage
            self.timings = message.timings


@dataclass
class System:
    router: RouterServer
    stub: GenerationServiceStub
    workers: list[FakeWorker]
    channel: grpc.aio.Channel
    port: int

    async def ask(self, request: GenerateRequest, timeout: float | None = WAIT_SECONDS) -> Answer:
        return await collect(self.stub.Generate(request, timeout=timeout))

    async def quiet(self) -> None:
        """Until nothing is open anywhere; the sizes of all maps are then those of an idle system."""
        await until(lambda: not len(self.router.parts.open_requests))
        await until(lambda: not any(w.running for w in self.workers))
        for link in self.router.parts.workers.links.values():
            assert link.load.num_open == 0 and not link.load.awaits_answers
            assert not link._sequences


async def collect(call) -> Answer:
    """What is still to come of a call; some of it may have been read."""
    answer = Answer()
    while (message := await call.read()) is not grpc.aio.EOF:
        answer.add(message)
    assert answer.usage is not None, "the stream ended without its last message"
    return answer


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def error_of(call: Awaitable) -> FissileError:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("expected an error")


def run_system(
    scenario,
    *workers: FakeWorker,
    wait_ready: bool = True,
    resolver: Resolver = resolve_name,
    tls: ClientTls | None = None,
    limit: float = 180,
    **settings,
):
    """Start the workers and a router over them, run `scenario(system)` with a client that uses `tls`, stop all; returns
    its result. `limit`: seconds."""

    async def run():
        for worker in workers:
            await worker.start()
        addresses = [w.address for w in workers]
        router = RouterServer(RouterSettings(**{**QUICK, "workers": addresses, **settings}), resolver)
        port = await router.start()
        async with aio_channel(f"127.0.0.1:{port}", tls) as channel:
            system = System(router, GenerationServiceStub(channel), list(workers), channel, port)
            try:
                if wait_ready:
                    await until(lambda: all(link.is_available for link in router.parts.workers.links.values()))
                return await asyncio.wait_for(scenario(system), limit)
            finally:
                await router.stop()
                for worker in workers:
                    with suppress(grpc.aio.UsageError):
                        await worker.kill()

    return asyncio.run(run())
