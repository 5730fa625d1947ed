"""What routing by prefix saves: four workers with caches that are too small for all prefixes, one policy after another.

The workers' schedulers and caches are real, their devices take 3 ms a step and 0.1 ms a token (`simulated_worker.py`),
the router is a process of its own. The trace: requests at random times, each one of 44 prefixes of 512 tokens and 32
tokens of its own, 16 tokens out. A cache holds about a quarter of the prefixes. Hit rate: of the prompt tokens that the
workers looked up. Hot spot: workers × largest share of the requests.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.common import Figure, finish, median, parse_arguments, ratio
from bench.router import START_SECONDS, address_in
from fissile.channel import aio_channel
from fissile.cli.processes import Children
from fissile.healthcheck import wait_until_serving
from fissile.v1 import (
    ClearPrefixCacheRequest,
    GenerateRequest,
    GenerationOptions,
    GenerationServiceStub,
    GetLoadRequest,
    GetStatsRequest,
    TokenSequence,
    WorkerLoad,
    WorkerServiceStub,
)
from router.fleet.load import LoadTracker
from router.fleet.policies.policy import Work
from router.fleet.policies.prefix_aware import PrefixAware
from router.fleet.prefixes.prefixes import Prefixes

PACKAGES = ("grpcio", "protobuf", "fissile")
BASELINE = "round_robin"
POLICIES = (BASELINE, "least_loaded", "consistent_hash", "prefix_history", "prefix")
NUM_WORKERS = 4
NUM_BLOCKS = 400
NUM_PREFIXES = 44
PREFIX_TOKENS = 512
OWN_TOKENS = 32
OUTPUT_TOKENS = 16
REQUESTS_PER_SECOND = 24.0
FLEETS = (1, 8, 100)
"""Workers among which a choice is timed."""
PROMPT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one policy."""

    hit_rate: float
    ttft_ms: float
    """The median."""
    hotspot: float


def main() -> None:
    quick = parse_arguments(__doc__).quick
    num_requests = 80 if quick else 1000
    policies = (BASELINE, "prefix") if quick else POLICIES
    with running_workers() as workers:
        measured = {policy: run_policy(policy, workers, num_requests) for policy in policies}
    figures: dict[str, Figure] = {}
    for policy, one in measured.items():
        figures |= {
            f"hit_rate_{policy}": round(one.hit_rate, 3),
            f"ttft_p50_ms_{policy}": round(one.ttft_ms, 1),
            f"hotspot_{policy}": round(one.hotspot, 2),
        }
    ours, baseline = measured["prefix"], measured[BASELINE]
    for num_workers in FLEETS:
        figures |= choice_cost(num_workers, 20 if quick else 500)
    figures |= {
        "hit_rate_ratio": ratio(ours.hit_rate, baseline.hit_rate),
        "ttft_p50_ratio": ratio(ours.ttft_ms, baseline.ttft_ms),
        "hotspot": round(ours.hotspot, 2),
    }
    finish("routing", figures, quick=quick, dtype="none", packages=PACKAGES)


@dataclass(slots=True)
class Worker:
    """As a policy sees it."""

    address: str
    load: LoadTracker
    num_sessions: int = 1

    @property
    def session(self) -> tuple[str, int]:
        return self.address, self.num_sessions


def choice_cost(num_workers: int, repeats: int) -> dict[str, Figure]:
    """The default policy alone, in this process: of a prompt that no worker has, and of one that all have."""
    rng = random.Random(1)
    workers = [Worker(f"10.0.0.{number}:50061", LoadTracker(block_size=16)) for number in range(num_workers)]
    prefixes = Prefixes(1 << 30)
    views = [prefixes.follow(worker.session, 16) for worker in workers]
    for worker, view in zip(workers, views, strict=True):
        worker.load.reported(WorkerLoad(num_running=8, num_blocks=50_000, num_used_blocks=3000))
        view.store([rng.getrandbits(64) for _ in range(2000)])
    policy = PrefixAware(prefixes, rng)
    prompt = [rng.randrange(50_000) for _ in range(PROMPT_TOKENS)]

    def microseconds() -> float:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            policy.choose(Work(prompt), workers)
            times.append((time.perf_counter() - begin) * 1e6)
        return median(times, 1)

    new = microseconds()
    for view in views:
        view.store(list(Work(prompt).block_hashes(16, PROMPT_TOKENS // 16)))
    return {f"choose_new_us_{num_workers}": new, f"choose_cached_us_{num_workers}": microseconds()}


@contextmanager
def running_workers() -> Iterator[list[str]]:
    """Their addresses."""
    children = Children(lambda _name, _line: None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, str(number)) for number in range(NUM_WORKERS)]
            for file in files:
                flags = ["--port-file", str(file), "--num-blocks", str(NUM_BLOCKS)]
                children.start(f"worker-{file.name}", [sys.executable, "-m", "bench.simulated_worker", *flags])
            yield [address_in(file) for file in files]
    finally:
        children.stop(5.0)


def run_policy(policy: str, workers: Sequence[str], num_requests: int) -> Measured:
    """With a router of its own, and caches that are empty at the beginning."""
    children = Children(lambda _name, _line: None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "router")
            flags = ["--port", "0", "--port-file", str(file), "--workers", ",".join(workers), "--policy", policy]
            process = children.start("router", [sys.executable, "-m", "router", *flags, "--log-level", "warning"])
            address = address_in(file)
            assert wait_until_serving(address, START_SECONDS) == "SERVING", list(process.last_lines)
            return asyncio.run(measure(address, workers, num_requests))
    finally:
        children.stop(5.0)


async def measure(router: str, workers: Sequence[str], num_requests: int) -> Measured:
    before = [await load_of(worker, clear=True) for worker in workers]
    async with aio_channel(router) as channel:
        stub = GenerationServiceStub(channel)
        while sum(worker.healthy for worker in (await stub.GetStats(GetStatsRequest())).workers) < len(workers):
            await asyncio.sleep(0.05)
        ttfts = await replay(stub, num_requests)
    after = [await load_of(worker) for worker in workers]
    counts = list(zip(before, after, strict=True))
    num_hits = sum(b.num_prefix_hits - a.num_prefix_hits for a, b in counts)
    num_queries = sum(b.num_prefix_queries - a.num_prefix_queries for a, b in counts)
    num_tokens = [b.num_generated_tokens - a.num_generated_tokens for a, b in counts]
    return Measured(
        hit_rate=num_hits / num_queries,
        ttft_ms=median([seconds * 1e3 for seconds in ttfts], 3),
        hotspot=len(workers) * max(num_tokens) / sum(num_tokens),
    )


async def load_of(worker: str, *, clear: bool = False) -> WorkerLoad:
    async with aio_channel(worker) as channel:
        stub = WorkerServiceStub(channel)
        if clear:
            await stub.ClearPrefixCache(ClearPrefixCacheRequest())
        return (await stub.GetLoad(GetLoadRequest())).load


async def replay(stub: GenerationServiceStub, num_requests: int) -> list[float]:
    """Send the trace; seconds to each first token, as the client sees them. The same for every policy."""
    rng = random.Random(1)
    prefixes = [random_tokens(rng, PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    loop = asyncio.get_running_loop()
    at = loop.time()
    tasks = []
    for _ in range(num_requests):
        at += rng.expovariate(REQUESTS_PER_SECOND)
        prompt = rng.choice(prefixes) + random_tokens(rng, OWN_TOKENS)
        await asyncio.sleep(max(0.0, at - loop.time()))
        tasks.append(asyncio.create_task(ttft(stub, prompt)))
    return await asyncio.gather(*tasks)


def random_tokens(rng: random.Random, length: int) -> list[int]:
    """Within the vocabulary of the simulated model, and none that ends an answer."""
    return [rng.randrange(11, 100) for _ in range(length)]


async def ttft(stub: GenerationServiceStub, prompt: list[int]) -> float:
    begin = asyncio.get_running_loop().time()
    first = 0.0
    options = GenerationOptions(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    async for message in stub.Generate(GenerateRequest(tokens=TokenSequence(token_ids=prompt), options=options)):
        if not first and message.completions:
            first = asyncio.get_running_loop().time() - begin
    return first


if __name__ == "__main__":
    main()
