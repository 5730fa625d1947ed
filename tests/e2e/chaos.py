"""Requests of many kinds, what came of them, and what can be done to a fleet in the meantime."""

import asyncio
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from fissile import AsyncClient
from fissile.errors import FissileError
from tests.e2e.fleet import Fleet

WORDS = [
    "the",
    "capital",
    "of",
    "France",
    "is",
    "Paris",
    "hello",
    "world",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
]
LIMIT_SECONDS = 120.0
"""For all requests of a round."""


@dataclass(frozen=True)
class Ask:
    prompt: str
    seed: int
    temperature: float
    n: int
    max_tokens: int


@dataclass
class Outcome:
    """What a client was given."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    """By completion."""
    error: str = ""
    """Its status; empty: the stream came to its end."""


def some_asks(number: int, seed: int) -> list[Ask]:
    """Greedy and sampled, one completion and three, short and long."""
    rng = random.Random(seed)
    return [
        Ask(
            prompt=" ".join(rng.choices(WORDS, k=rng.randint(1, 40))),
            seed=rng.randrange(1 << 32),
            temperature=rng.choice((0.0, 0.8, 1.3)),
            n=3 if rng.random() < 0.1 else 1,
            max_tokens=rng.randint(300, 900),  # for seconds: a busy machine takes part of one to ask what is open
        )
        for _ in range(number)
    ]


class _Strike:
    """Does something to the fleet once so many streams have begun."""

    def __init__(self, hurt: Callable[[], None], num_begun: int) -> None:
        self._hurt, self._num_left = hurt, num_begun
        self._is_due = asyncio.Event()

    def begun(self) -> None:
        """A stream has had its first message."""
        self._num_left -= 1
        if self._num_left <= 0:
            self._is_due.set()

    async def run(self) -> None:
        await self._is_due.wait()
        await asyncio.to_thread(self._hurt)


async def _outcome(client: AsyncClient, ask: Ask, begun: Callable[[], None]) -> Outcome:
    outcome = Outcome({index: [] for index in range(ask.n)})
    try:
        stream = client.generate(
            ask.prompt,
            seed=ask.seed,
            temperature=ask.temperature,
            n=ask.n,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            return_token_ids=True,
        )
        is_first = True
        async for delta in stream:
            outcome.tokens[delta.index] += delta.token_ids
            if is_first:
                begun()
            is_first = False
    except FissileError as error:
        outcome.error = error.code.name
    return outcome


async def _outcomes(fleet: Fleet, asks: list[Ask], hurt: Callable[[], None], num_begun: int) -> list[Outcome]:
    """Each router is some clients' first choice."""
    strike = _Strike(hurt, num_begun)
    async with AsyncClient(fleet.addresses) as one, AsyncClient(fleet.addresses[::-1]) as other:
        answers = [_outcome((one, other)[at % 2], ask, strike.begun) for at, ask in enumerate(asks)]
        async with asyncio.timeout(LIMIT_SECONDS):
            _, *found = await asyncio.gather(strike.run(), *answers)
    return found


def outcomes(
    fleet: Fleet, asks: list[Ask], hurt: Callable[[], None] = lambda: None, num_begun: int = 1
) -> list[Outcome]:
    """In order, while `hurt` does something to the fleet once so many streams have begun."""
    return asyncio.run(_outcomes(fleet, asks, hurt, num_begun))


@dataclass(frozen=True)
class Fault:
    name: str
    of_router: bool
    hurt: Callable[[Fleet, int], None]
    """One of its services, by number."""

    def strike(self, fleet: Fleet, number: int) -> None:
        """While that one has something to lose."""
        assert fleet.num_open(number, of_router=self.of_router), f"{self.name}: it has no requests"
        self.hurt(fleet, number)


def _cut(fleet: Fleet, number: int) -> None:
    proxy = fleet.workers[number].proxy
    assert proxy is not None
    proxy.cut()


WORKER_STOPPED = Fault("worker stopped", False, lambda fleet, number: fleet.workers[number].signal(signal.SIGSTOP))
FAULTS = (
    Fault("worker killed", False, lambda fleet, number: fleet.workers[number].signal(signal.SIGKILL)),
    WORKER_STOPPED,
    Fault("rank killed", False, lambda fleet, number: fleet.workers[number].signal_rank(signal.SIGKILL)),
    Fault("rank stopped", False, lambda fleet, number: fleet.workers[number].signal_rank(signal.SIGSTOP)),
    Fault("network cut", False, _cut),
    Fault("router killed", True, lambda fleet, number: fleet.routers[number].signal(signal.SIGKILL)),
    Fault("router stopped", True, lambda fleet, number: fleet.routers[number].signal(signal.SIGSTOP)),
)
