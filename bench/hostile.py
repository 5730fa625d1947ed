"""What one hostile client costs the others: 2,000 streams of 20 clients through a router, and beside them, one kind
after the other, a client that means harm. All on this machine's cores, the hostile client among them.

The figures are p99 and p50 of the others' time to the first token: `calm_…` without it, and with it how many times
that, a ratio a kind. The same again with `elsewhere`: the client attacks another router, which does nothing else, so
that is what its work, and what it makes of work, take from the cores that all share; the rest is what it costs in the
router itself. `others_failed` counts streams of the others that did not end as they should.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil

from bench.attacks import KINDS
from bench.common import Figure, finish, parse_arguments
from bench.router import PACKAGES, START_SECONDS, address_in
from fissile.channel import aio_channel, call_metadata
from fissile.cli.processes import Child, Children
from fissile.cli.report import quantile
from fissile.healthcheck import wait_until_serving
from fissile.v1 import GenerateRequest, GenerationOptions, GenerationServiceStub

NUM_OTHERS = 20
"""Clients, each with a key and a connection of its own and an equal part of the streams."""
HOSTILE = "hostile"
NAMES = (HOSTILE, *(f"client-{number}" for number in range(NUM_OTHERS)))


@dataclass(frozen=True, slots=True)
class Sizes:
    num_streams: int
    num_tokens: int
    """Of each stream."""
    step_time: float
    seconds: float
    """Of each measurement."""
    pause: float
    """After each, until the next begins."""


FULL = Sizes(num_streams=2000, num_tokens=60, step_time=0.5, seconds=12.0, pause=3.0)
QUICK = Sizes(num_streams=50, num_tokens=20, step_time=0.05, seconds=2.0, pause=0.5)


@dataclass(frozen=True, slots=True)
class System:
    children: Children
    router: Child
    address: str
    http: str


def main() -> None:
    arguments = parse_arguments(__doc__, parts=list(KINDS))
    sizes = QUICK if arguments.quick else FULL
    with running_system(sizes.step_time) as system, running_system(sizes.step_time) as elsewhere:
        figures = asyncio.run(measure(sizes, system, elsewhere, arguments.parts))
    finish("hostile", figures, quick=arguments.quick, dtype="none", packages=PACKAGES)


@contextmanager
def running_system(step_time: float) -> Iterator[System]:
    """A worker and a router over it, which knows the clients by their keys."""
    children = Children(lambda _name, _line: None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder, name) for name in ("worker", "router", "http", "keys")}
            files["keys"].write_text("".join(f'[[keys]]\nname = "{n}"\nsecret = "{secret(n)}"\n' for n in NAMES))
            command = [sys.executable, "-m", "bench.synthetic_worker", "--port-file", str(files["worker"])]
            children.start("worker", [*command, "--step-time", str(step_time)])
            flags = ["--port", "0", "--port-file", str(files["router"]), "--workers", address_in(files["worker"])]
            flags += ["--http-port", "0", "--http-port-file", str(files["http"]), "--api-key-file", str(files["keys"])]
            process = children.start("router", [sys.executable, "-m", "router", *flags, "--log-level", "warning"])
            address = address_in(files["router"])
            assert wait_until_serving(address, START_SECONDS) == "SERVING", list(process.last_lines)
            yield System(children, process, address, address_in(files["http"]))
    finally:
        children.stop(5.0)


def secret(name: str) -> str:
    return f"secret-of-{name}-for-a-benchmark"


@dataclass(slots=True)
class Others:
    """So many streams at a time: each that ends is followed by a new one."""

    sizes: Sizes
    ttfts: list[float] = field(default_factory=list)
    """Seconds, of streams that got theirs since they were last looked at."""
    waiting: dict[int, float] = field(default_factory=dict)
    """When those began that have got nothing yet."""
    num_failed: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        channels = [aio_channel(address) for _ in range(NUM_OTHERS)]
        stubs = [GenerationServiceStub(channel) for channel in channels]
        tasks = [asyncio.create_task(self._repeat(stubs, number)) for number in range(self.sizes.num_streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for channel in channels:
                await channel.close()

    async def _repeat(self, stubs: list[GenerationServiceStub], number: int) -> None:
        """They begin one after the other, as long as a stream takes: later they end so, too."""
        share = number / self.sizes.num_streams
        await asyncio.sleep(share * self.sizes.num_tokens * self.sizes.step_time)
        while True:
            await self._one(stubs[number % NUM_OTHERS], number)

    async def _one(self, stub: GenerationServiceStub, number: int) -> None:
        request = GenerateRequest(text="How long?", options=GenerationOptions(max_tokens=self.sizes.num_tokens))
        self.waiting[number] = time.perf_counter()
        num_tokens = 0
        try:
            async for message in stub.Generate(request, metadata=call_metadata(secret(NAMES[1 + number % NUM_OTHERS]))):
                if number in self.waiting:
                    self.ttfts.append(time.perf_counter() - self.waiting.pop(number))
                num_tokens = message.usage.num_completion_tokens
        except grpc.aio.AioRpcError as error:
            self.failures[f"{error.code().name}: {error.details()}"] += 1
        self.num_failed += num_tokens != self.sizes.num_tokens

    async def watch(self, seconds: float) -> tuple[float, float]:
        """p50 and p99 of the time to the first token, in milliseconds: of what gets its first token from now on, and
        of what still waits for it then, as long as that has waited."""
        self.ttfts.clear()
        await asyncio.sleep(seconds)
        now = time.perf_counter()
        ordered = sorted([*self.ttfts, *(now - begin for begin in self.waiting.values())])
        return quantile(ordered, 0.5) * 1e3, quantile(ordered, 0.99) * 1e3

    async def recover(self, sizes: Sizes) -> None:
        """Until nobody waits for long any more."""
        for _ in range(60):
            await asyncio.sleep(sizes.pause)
            now = time.perf_counter()
            if all(now - begin < 4 * sizes.step_time + 0.2 for begin in self.waiting.values()):
                return
        raise TimeoutError("the router does not recover")


async def measure(sizes: Sizes, system: System, elsewhere: System, kinds: Sequence[str]) -> dict[str, Figure]:
    """Of the others' streams at `system`."""
    others, process = Others(sizes), psutil.Process(system.router.pid)
    async with others.running(system.address):
        await asyncio.sleep(1.5 * sizes.num_tokens * sizes.step_time)
        calm = await others.watch(sizes.seconds)
        figures: dict[str, Figure] = {"calm_p50_ms": round(calm[0], 1), "calm_p99_ms": round(calm[1], 1)}
        print(f"calm: p50 {calm[0]:.0f} ms, p99 {calm[1]:.0f} ms, {len(others.ttfts)} streams", flush=True)
        for kind in kinds:
            for name, target in ((kind, system), (f"{kind}_elsewhere", elsewhere)):
                p50, p99 = await beside(kind, target, others)
                rss = process.memory_info().rss >> 20
                print(f"{name}: p50 {p50:.0f} ms, p99 {p99:.0f} ms, {len(others.ttfts)} streams, router {rss} MiB")
                figures |= {f"{name}_p50_ratio": round(p50 / calm[0], 2), f"{name}_p99_ratio": round(p99 / calm[1], 2)}
                await others.recover(sizes)
    for failure, number in others.failures.most_common(5):
        print(f"{number} streams of the others failed: {failure}", flush=True)
    figures |= {"others_failed": others.num_failed, "router_rss_mb": round(process.memory_info().rss / 1e6, 1)}
    return figures


async def beside(kind: str, target: System, others: Others) -> tuple[float, float]:
    """What `Others.watch` says while a hostile client is at work there."""
    flags = ["--router", target.address, "--http", target.http, "--key", secret(HOSTILE)]
    attacker = target.children.start(kind, [sys.executable, "-m", "bench.attacks", kind, *flags])
    await asyncio.sleep(1.0)  # to start
    quantiles = await others.watch(others.sizes.seconds)
    assert attacker.exit_code is None, list(attacker.last_lines)
    attacker.kill()
    return quantiles


if __name__ == "__main__":
    main()
