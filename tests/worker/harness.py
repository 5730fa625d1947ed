"""A worker over real sockets in one event loop, with a fake executor and everything else real."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fissile.channel import aio_channel
from fissile.v1 import (
    AbortSequence,
    ExecuteCommand,
    ExecuteRequest,
    ExecuteResponse,
    RequestOutput,
    Sequence,
    SequenceGroup,
    WorkerServiceStub,
)
from tests.core.fake_runner import next_token
from tests.worker.fake_executor import FakeExecutor
from worker.config import WorkerSettings
from worker.face.served_files import ServedFiles
from worker.loader.tokenizer import TokenizerFiles
from worker.server import WorkerServer

WAIT_SECONDS = 60
TOKENIZER = TokenizerFiles({"tokenizer.json": b"x" * 2_500_000, "empty.json": b""})
FILES = ServedFiles(TOKENIZER, model_fingerprint="f1")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

_prompts = itertools.count(11)


def restart_prompts() -> None:
    """Begin again with the first prompt: a test must have the same ones whatever ran before it."""
    global _prompts
    _prompts = itertools.count(11)


@dataclass
class System:
    server: WorkerServer
    executor: FakeExecutor
    stub: WorkerServiceStub
    address: str
    loaded: asyncio.Task[None]
    """Ends when it serves."""


def run_worker(
    scenario: Callable[[System], Awaitable[Any]],
    prepare: Callable[[FakeExecutor], None] | None = None,
    num_blocks: int = 64,
    max_model_len: int = 64,
    files: ServedFiles = FILES,
    num_groups: int = 0,
    num_checkpoints: int = 0,
    **settings: object,
) -> Any:
    """Run `scenario` against a worker that is serving; with `prepare`, against one that may still be loading.

    In the end nothing may be left open, in the broker or in the scheduler.
    """

    async def run():
        async with asyncio.timeout(180):
            options = {
                "host": "127.0.0.1",
                "port": 0,
                "drain_timeout": 5.0,
                "max_num_batched_tokens": 2048,
                "max_output_rate": 1e9,
            }
            config = WorkerSettings(**(options | settings))
            executor = FakeExecutor(num_blocks=num_blocks, block_size=config.block_size, max_model_len=max_model_len)
            executor.num_groups, executor.num_checkpoints = num_groups, num_checkpoints
            if prepare is not None:
                prepare(executor)
            server = WorkerServer(config, partial(_with_callback, executor), lambda: files)
            await server.listen()
            loading = asyncio.create_task(server.load())
            address = f"127.0.0.1:{server.port}"
            try:
                if prepare is None:
                    await loading
                async with aio_channel(address) as channel:
                    return await scenario(System(server, executor, WorkerServiceStub(channel), address, loading))
            finally:
                executor.loading.set()
                executor.open.set()
                await asyncio.gather(loading, return_exceptions=True)
                await server.stop()

    return asyncio.run(run())


def _with_callback(executor: FakeExecutor, on_rank_end: Callable[[], None]) -> FakeExecutor:
    executor._on_rank_end = on_rank_end
    return executor


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def sequence(
    id: int, prompt: list[int] | int = 5, max_tokens: int = 4, generated: tuple[int, ...] = (), **fields: object
) -> SequenceGroup:
    """A group of one, with its id as its seed. A prompt given as a number is that long and like no other."""
    return group([Sequence(id=id, seed=id, token_ids=generated)], prompt, max_tokens, **fields)


def group(
    members: list[Sequence] | int, prompt: list[int] | int = 5, max_tokens: int = 4, **fields: object
) -> SequenceGroup:
    """Members given as a number have the ids from 1 on, the indices from 0 on, and their ids as seeds."""
    if isinstance(members, int):
        members = [Sequence(id=1 + index, index=index, seed=1 + index) for index in range(members)]
    tokens = [next(_prompts) % 89 + 11 for _ in range(prompt)] if isinstance(prompt, int) else prompt
    defaults = {"prompt_token_ids": tokens, "max_tokens": max_tokens, "ignore_eos": True, "sequences": members}
    return SequenceGroup(**(defaults | fields))


def expected(message: SequenceGroup, num_tokens: int, index: int = 0) -> list[int]:
    """What the fake model generates after the tokens that the member at `index` of `message` brings."""
    member = message.sequences[index]
    start = [*message.prompt_token_ids, *member.token_ids]
    tokens = list(start)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, member.seed))
    return tokens[len(start) :]


def fault(output: RequestOutput) -> str:
    """The field at fault and what is wrong with it."""
    return f"{output.field}: {output.detail}"


def ids_of(message: SequenceGroup) -> list[int]:
    return [member.id for member in message.sequences]


@dataclass
class Router:
    """One Execute stream. Collects what comes."""

    call: Any
    messages: list[ExecuteResponse] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[int, RequestOutput] = field(default_factory=dict)

    async def send(self, *commands: SequenceGroup | int) -> None:
        """In one message; a number aborts that sequence."""
        await self.call.write(
            ExecuteRequest(
                commands=[
                    ExecuteCommand(abort=AbortSequence(sequence_id=command))
                    if isinstance(command, int)
                    else ExecuteCommand(group=command)
                    for command in commands
                ]
            )
        )

    async def read(self) -> bool:
        """Take in one message; False at the end of the stream. A sequence must not go on after its end."""
        try:
            message = await self.call.read()
        except grpc.aio.AioRpcError:
            return False
        if not isinstance(message, ExecuteResponse):
            return False
        self.messages.append(message)
        for output in message.outputs:
            assert output.sequence_id not in self.ended, "news after the terminal output"
            tokens = self.tokens[output.sequence_id]
            tokens += output.token_ids
            if output.finish_reason:
                self.ended[output.sequence_id] = output
        return True

    def outputs_of(self, id: int) -> list[RequestOutput]:
        """Those that came."""
        return [output for message in self.messages for output in message.outputs if output.sequence_id == id]

    async def end(self) -> tuple[str, str]:
        """Read to the end of the stream; its status and message."""
        async with asyncio.timeout(WAIT_SECONDS):
            while await self.read():
                pass
        return (await self.call.code()).name, await self.call.details()

    async def finish(self, *ids: int) -> None:
        """Read until these have ended."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not set(ids) <= self.ended.keys():
                assert await self.read(), f"the stream ended with {sorted(self.ended)}"

    async def read_tokens(self, id: int, num_tokens: int) -> None:
        """Read until the sequence has so many tokens."""
        async with asyncio.timeout(WAIT_SECONDS):
            while len(self.tokens[id]) < num_tokens:
                assert await self.read()


def connect(system: System) -> Router:
    return Router(system.stub.Execute())


async def run_all(system: System, *commands: SequenceGroup | int) -> Router:
    """Send one message and read until all its sequences have ended."""
    router = connect(system)
    await router.send(*commands)
    groups = [command for command in commands if isinstance(command, SequenceGroup)]
    await router.finish(*(id for group in groups for id in ids_of(group)))
    return router


async def quiet(system: System) -> None:
    """Nothing is open and no block is held; asks the engine, so that no report is outstanding."""
    assert system.server._broker is not None and system.server._engine is not None
    engine = system.server._engine
    await until(lambda: system.server._broker.num_open == 0)
    async with asyncio.timeout(WAIT_SECONDS):
        while (load := await asyncio.wrap_future(engine.call(lambda s: s.load()))).num_used_blocks:
            await asyncio.sleep(0.002)
    await asyncio.wrap_future(engine.call(lambda s: s.check_integrity()))
    assert (load.num_running, load.num_waiting, load.num_swapped) == (0, 0, 0)


async def health(system: System, service: str = "") -> int:
    async with aio_channel(system.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def until_health(system: System, status: int) -> None:
    async with asyncio.timeout(20):
        while await health(system) != status:
            await asyncio.sleep(0.002)
