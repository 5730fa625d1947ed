"""Load for `fissile bench`: requests with random prompts, sent in an open or a closed loop, each one measured.

Open loop: requests are due at the times of a Poisson process, whatever the server does, and latency counts from the
time a request was due: a slow server cannot slow down its own measurement. Closed loop: a fixed number of clients,
each sending its next request when the last one has ended.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from fissile.async_client import AsyncClient
from fissile.cli.lengths import Lengths
from fissile.errors import FissileError, UnavailableError


@dataclass(frozen=True, slots=True)
class LoadConfig:
    num_requests: int
    input_length: Lengths
    output_length: Lengths
    rate: float | None
    """Requests a second on average (open loop); None: closed loop."""
    concurrency: int
    """Clients of the closed loop."""
    model: str
    seed: int
    temperature: float
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    num_output_tokens: int


@dataclass(slots=True)
class Outcome:
    """One request, timed on this process's monotonic clock."""

    due: float
    end: float = 0.0
    num_prompt_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Messages with tokens: when, and how many."""
    error: str = ""
    """gRPC status of a request that failed; empty for one that did not."""
    complaint: str = ""
    """What came with that status."""

    @property
    def num_output_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0][0] - self.due if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first message."""
        late = self.num_output_tokens - self.arrivals[0][1] if self.arrivals else 0
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / late if late else None

    @property
    def itls(self) -> list[float]:
        """Gaps between messages with tokens."""
        times = [when for when, _ in self.arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


OneRequest = Callable[[Request, float], Coroutine[Any, Any, None]]
"""Sends a request that was due at that time."""


def make_requests(config: LoadConfig, vocab_size: int) -> Iterator[Request]:
    """Prompts of random token ids, all different, so that no prefix cache helps; the same for the same seed."""
    rng = random.Random(config.seed)
    lowest = min(1000, vocab_size // 2)  # special tokens usually come first
    for _ in range(config.num_requests):
        prompt = [rng.randrange(lowest, vocab_size) for _ in range(config.input_length.draw(rng))]
        yield Request(prompt, config.output_length.draw(rng))


async def run_load(client: AsyncClient, config: LoadConfig, done: Callable[[Outcome], None]) -> None:
    """Send all requests; `done` is called with the outcome of each. Failures are outcomes, not exceptions. Raises
    UnavailableError if there is no model."""
    models = await client.models(timeout=10)
    if not models:
        raise UnavailableError("the router has no worker yet, so there is no model to load")
    model = next((entry for entry in models if entry.id == config.model), models[0])
    requests = make_requests(config, model.vocab_size)

    async def one(request: Request, due: float) -> None:
        done(await measure(client, config, request, due))

    if config.rate is not None:
        await _open_loop(requests, config.rate, random.Random(config.seed + 1), one)
    else:
        await _closed_loop(requests, config.concurrency, one)


async def _open_loop(
    requests: Iterator[Request],
    rate: float,
    rng: random.Random,
    one: OneRequest,
) -> None:
    due = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(one(request, due))
            due += rng.expovariate(rate)


async def _closed_loop(
    requests: Iterator[Request],
    concurrency: int,
    one: OneRequest,
) -> None:
    async def client() -> None:
        for request in requests:  # shared: each client takes the next one
            await one(request, time.monotonic())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())


async def measure(client: AsyncClient, config: LoadConfig, request: Request, due: float) -> Outcome:
    outcome = Outcome(due, num_prompt_tokens=len(request.prompt))
    try:
        stream = client.generate(
            request.prompt,
            model=config.model,
            timeout=config.timeout,
            max_tokens=request.num_output_tokens,
            temperature=config.temperature,
            ignore_eos=True,
            return_token_ids=True,
        )
        async for delta in stream:
            if delta.token_ids:
                outcome.arrivals.append((time.monotonic(), len(delta.token_ids)))
    except FissileError as error:
        outcome.error, outcome.complaint = error.code.name, error.message
    outcome.end = time.monotonic()
    return outcome
