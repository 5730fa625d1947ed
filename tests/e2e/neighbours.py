"""Eight ordinary streams, in a process of their own: what another client does must not be seen in them."""

import asyncio
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from fissile import AsyncClient

PROMPTS = [f"{i} {subject}" for i, subject in enumerate(("The sea", "A king", "My dog", "Rain", "The old house"))]
NUM_STREAMS, NUM_TOKENS = 8, 12


@dataclass(frozen=True)
class Seen:
    tokens: set[tuple[int, tuple[int, ...]]]
    """(number of the stream, its tokens), of all rounds."""
    num_rounds: int
    longest_gap: float
    """Seconds between two messages of one stream."""
    faults: list[str]


class Neighbours:
    """The eight streams, again and again, from `start` to `stop`. A round that has begun ends."""

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(address, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def start(self) -> None:
        """Returns once all eight have had a token."""
        self._pipe.send("start")
        assert self._pipe.recv() == "started"

    def stop(self) -> Seen:
        self._pipe.send("stop")
        seen = self._pipe.recv()
        assert isinstance(seen, Seen)
        return seen

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(address: str, pipe: Connection) -> None:
    asyncio.run(_rounds(address, pipe))


async def _rounds(address: str, pipe: Connection) -> None:
    async with AsyncClient(address) as client:
        while True:
            assert await asyncio.to_thread(pipe.recv) == "start"
            streams = [_Stream(client, i) for i in range(NUM_STREAMS)]
            stop = asyncio.create_task(asyncio.to_thread(pipe.recv))
            rounds = asyncio.create_task(_repeat(streams, stop))
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
            pipe.send("started")
            num_rounds = await rounds
            pipe.send(
                Seen(
                    {(stream.number, tokens) for stream in streams for tokens in stream.tokens},
                    num_rounds,
                    max(stream.longest_gap for stream in streams),
                    [fault for stream in streams for fault in stream.faults],
                )
            )


async def _repeat(streams: "list[_Stream]", stop: "asyncio.Task[str]") -> int:
    num_rounds = 0
    while not stop.done():
        await asyncio.gather(*(stream.run() for stream in streams))
        num_rounds += 1
    return num_rounds


class _Stream:
    def __init__(self, client: AsyncClient, number: int) -> None:
        self.number = number
        self.begun = asyncio.Event()
        self.tokens: list[tuple[int, ...]] = []
        self.longest_gap = 0.0
        self.faults: list[str] = []
        self._client = client

    async def run(self) -> None:
        prompt = PROMPTS[self.number % len(PROMPTS)] + " " * (self.number // len(PROMPTS))
        tokens: list[int] = []
        last: float | None = None
        try:
            async for delta in self._client.generate(
                prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, return_token_ids=True
            ):
                now = time.monotonic()
                if last is not None:
                    self.longest_gap = max(self.longest_gap, now - last)
                last = now
                tokens += delta.token_ids
                self.begun.set()
        except Exception as error:
            self.faults.append(repr(error))
            self.begun.set()
        self.tokens.append(tuple(tokens))
