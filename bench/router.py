"""What the router costs, and what peers cost: a synthetic worker, the real router, this process as the client; all on
this machine's cores.

The worker makes steps at no cost, one token for each of 64 streams, so the router is what limits.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.common import Figure, finish, median, parse_arguments
from bench.peers import openai_load, routers
from fissile.channel import aio_channel
from fissile.cli.processes import Child, Children
from fissile.cli.report import quantile
from fissile.healthcheck import wait_until_serving
from fissile.v1 import (
    ExecuteCommand,
    ExecuteRequest,
    GenerateRequest,
    GenerationOptions,
    GenerationServiceStub,
    Sequence,
    SequenceGroup,
    WorkerServiceStub,
)

PACKAGES = ("grpcio", "protobuf", "tokenizers", "fissile")
NUM_STREAMS = 64
MODEL = "synthetic"
PROMPT = "What does a router cost?"
STOP = "never in the text"
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each measurement."""

    repeats: int
    num_tokens: int
    """Of each stream."""
    num_requests: int
    num_pairs: int
    """Requests through the router, and as many at the worker."""
    num_distinct: int
    """Requests of as many prompts, over which the router should not grow."""


FULL = Sizes(repeats=5, num_tokens=1500, num_requests=3000, num_pairs=1000, num_distinct=100_000)
QUICK = Sizes(repeats=1, num_tokens=50, num_requests=200, num_pairs=20, num_distinct=1000)


def main() -> None:
    arguments = parse_arguments(
        __doc__, peers="also with --quick", ours="no peers: how a change of ours did, in three minutes"
    )
    sizes = QUICK if arguments.quick else FULL
    with running_pair() as pair:
        figures = asyncio.run(measure(sizes, pair))
    if not (arguments.ours or (arguments.quick and not arguments.peers)):
        figures |= routers.measure_all(
            routers.Sizes(sizes.repeats, NUM_STREAMS, sizes.num_tokens // 10, sizes.num_requests, sizes.num_pairs)
        )
    finish("router", figures, quick=arguments.quick, dtype="none", packages=PACKAGES)


@dataclass(frozen=True, slots=True)
class Pair:
    """A router and its worker, where they listen."""

    router: Child
    router_address: str
    http_port: int
    worker_address: str


@contextmanager
def running_pair() -> Iterator[Pair]:
    children = Children(lambda _name, _line: None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            worker_file, router_file, http_file = (Path(folder, name) for name in ("worker", "router", "http"))
            children.start("worker", [sys.executable, "-m", "bench.synthetic_worker", "--port-file", str(worker_file)])
            worker = address_in(worker_file)
            flags = ["--port", "0", "--port-file", str(router_file), "--workers", worker, "--metrics-port", "0"]
            flags += ["--http-port", "0", "--http-port-file", str(http_file)]
            flags += ["--prefix-index-mib", "1"]  # full soon, so that what grows is not that
            process = children.start("router", [sys.executable, "-m", "router", *flags])
            router = address_in(router_file)
            assert wait_until_serving(router, START_SECONDS) == "SERVING", list(process.last_lines)
            yield Pair(process, router, int(http_file.read_text()), worker)
    finally:
        children.stop(5.0)


def address_in(port_file: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not port_file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens: {port_file.name} did not come up")
        time.sleep(0.05)
    return f"127.0.0.1:{port_file.read_text().strip()}"


async def measure(sizes: Sizes, pair: Pair) -> dict[str, Figure]:
    process = psutil.Process(pair.router.pid)
    async with aio_channel(pair.router_address) as to_router, aio_channel(pair.worker_address) as to_worker:
        stub = GenerationServiceStub(to_router)
        await tokens_per_second(stub, sizes.num_tokens // 10)  # warm up
        runs, cores = [], []
        for _ in range(sizes.repeats):
            before, begin = cpu_seconds(process), time.perf_counter()
            runs.append(await tokens_per_second(stub, sizes.num_tokens))
            cores.append((cpu_seconds(process) - before) / (time.perf_counter() - begin))
        requests, costs = [], []
        for _ in range(sizes.repeats):
            before = cpu_seconds(process)
            requests.append(await requests_per_second(stub, sizes.num_requests))
            costs.append((cpu_seconds(process) - before) / sizes.num_requests * 1e6)
        through, direct = await latencies(stub, WorkerServiceStub(to_worker), sizes.num_pairs)
        rss = process.memory_info().rss
        growth = await rss_growth(stub, process, sizes.num_distinct)
    http = [
        (
            await openai_load.tokens_per_second(pair.http_port, NUM_STREAMS, sizes.num_tokens // 10, MODEL),
            await openai_load.requests_per_second(pair.http_port, NUM_STREAMS, sizes.num_requests, MODEL),
        )
        for _ in range(sizes.repeats)
    ]
    return {
        "tok_s": median([tokens for tokens, _ in runs], 0),
        "messages_s": median([messages for _, messages in runs], 0),
        "router_cores": median(cores),
        "requests_s": median(requests, 0),
        "router_us_request": median(costs, 0),
        "http_tok_s": median([tokens for tokens, _ in http], 0),
        "http_requests_s": median([requests for _, requests in http], 0),
        "added_latency_p50_ms": added(through, direct, 0.5),
        "added_latency_p99_ms": added(through, direct, 0.99),
        "router_rss_mb": round(rss / 1e6, 1),
        f"rss_growth_mb_{sizes.num_distinct}": growth,
    }


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def tokens_per_second(stub: GenerationServiceStub, num_tokens: int) -> tuple[float, float]:
    """Output tokens and messages a second, all streams together."""

    async def one() -> tuple[int, int]:
        messages = [message async for message in stub.Generate(request(num_tokens))]
        return messages[-1].usage.num_completion_tokens, len(messages)

    begin = time.perf_counter()
    answers = await asyncio.gather(*(one() for _ in range(NUM_STREAMS)))
    seconds = time.perf_counter() - begin
    return sum(tokens for tokens, _ in answers) / seconds, sum(messages for _, messages in answers) / seconds


async def requests_per_second(stub: GenerationServiceStub, num_requests: int) -> float:
    """Requests of one token, as many open as there are streams."""
    left = iter(range(num_requests))

    async def client() -> None:
        for _ in left:
            async for _message in stub.Generate(request(1)):
                pass

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(NUM_STREAMS)))
    return num_requests / (time.perf_counter() - begin)


async def rss_growth(stub: GenerationServiceStub, process: psutil.Process, num_requests: int) -> float:
    """MB that the router grows by over so many requests of distinct prompts, after a tenth as many."""

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            wanted = GenerateRequest(text=f"{number} {PROMPT * 4}", options=GenerationOptions(max_tokens=1))
            async for _message in stub.Generate(wanted):
                pass

    async def ask(numbers: Iterator[int]) -> None:
        await asyncio.gather(*(client(numbers) for _ in range(NUM_STREAMS)))

    await ask(iter(range(num_requests // 10)))
    before = process.memory_info().rss
    await ask(iter(range(num_requests // 10, num_requests + num_requests // 10)))
    return round((process.memory_info().rss - before) / 1e6, 1)


async def latencies(
    router: GenerationServiceStub, worker: WorkerServiceStub, num_pairs: int
) -> tuple[list[float], list[float]]:
    """Seconds from request to token, one at a time: through the router, and at the worker on a stream that is open.
    The two take turns."""
    through, direct = [], []
    execute = worker.Execute()
    for number in range(num_pairs):
        begin = time.perf_counter()
        async for _message in router.Generate(request(1)):
            pass
        middle = time.perf_counter()
        await execute.write(sequence(number))
        await execute.read()
        through.append(middle - begin)
        direct.append(time.perf_counter() - middle)
    execute.cancel()
    return through, direct


def request(num_tokens: int) -> GenerateRequest:
    return GenerateRequest(text=PROMPT, options=GenerationOptions(max_tokens=num_tokens, stop=[STOP]))


def sequence(number: int) -> ExecuteRequest:
    return ExecuteRequest(
        commands=[
            ExecuteCommand(
                group=SequenceGroup(prompt_token_ids=range(1, 8), max_tokens=1, sequences=[Sequence(id=number + 1)])
            )
        ]
    )


def added(through: list[float], direct: list[float], share: float) -> float:
    return round((quantile(sorted(through), share) - quantile(sorted(direct), share)) * 1e3, 3)


if __name__ == "__main__":
    main()
