"""Routers from PyPI, each in an environment of its own, over one worker that costs nothing (`openai_stub.py`).

They speak HTTP, so what is measured is what a client of theirs sees, with the same requests and streams as ours.
"""

import asyncio
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.common import Figure, median
from bench.peers import openai_load
from bench.peers.environment import HOME, PeerError, python_of
from fissile.cli.processes import Child, Children
from fissile.cli.report import quantile

START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RouterKind:
    """A peer: what it needs, and how it is started."""

    requirements: Sequence[str]
    command: Sequence[str]
    """After its environment's `bin`; its port, its worker's and its metrics' are put in."""


def _flags(program: str, *launch: str, warnings: str = "warn") -> tuple[str, ...]:
    """`warnings`: what it calls that level of its log."""
    flags = "--host 127.0.0.1 --port {port} --worker-urls http://127.0.0.1:{worker} --prometheus-port {metrics}"
    return program, *launch, *flags.split(), "--policy", "cache_aware", "--log-level", warnings


PEERS = {
    "smg": RouterKind(("smg==1.13.0",), _flags("smg", "launch")),
    "sglang_router": RouterKind(("sglang-router==0.3.2",), _flags("sglang-router", "launch")),
    "vllm_router": RouterKind(("vllm-router==0.1.17",), _flags("vllm-router", warnings="warning")),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    repeats: int
    num_streams: int
    num_tokens: int
    num_requests: int
    num_pairs: int


def measure_all(sizes: Sizes) -> dict[str, Figure]:
    """One after the other. Those that cannot be installed or driven are named, and their figures are None."""
    figures: dict[str, Figure] = {}
    for name, kind in PEERS.items():
        keys = [f"{name}_{key}" for key in ("tok_s", "requests_s", "added_latency_p50_ms", "added_latency_p99_ms")]
        try:
            python = python_of(name, kind.requirements)
            with running(name, python.parent, kind) as (router, worker):
                values: Sequence[Figure] = asyncio.run(measure(router, worker, sizes))
        except (PeerError, OSError, RuntimeError, ValueError, EOFError) as error:
            print(f"{name}: not measured: {error}", flush=True)
            values = [None] * len(keys)
        figures |= dict(zip(keys, values, strict=True))
    return figures


async def measure(router: int, worker: int, sizes: Sizes) -> tuple[float, float, float, float]:
    await openai_load.requests_per_second(router, sizes.num_streams, sizes.num_requests // 10)  # warm up
    streams = sizes.num_streams
    tokens = [await openai_load.tokens_per_second(router, streams, sizes.num_tokens) for _ in range(sizes.repeats)]
    rates = [await openai_load.requests_per_second(router, streams, sizes.num_requests) for _ in range(sizes.repeats)]
    through, direct = map(sorted, await openai_load.latencies(router, worker, sizes.num_pairs))
    p50, p99 = (round((quantile(through, share) - quantile(direct, share)) * 1e3, 3) for share in (0.5, 0.99))
    return median(tokens, 0), median(rates, 0), p50, p99


@contextmanager
def running(name: str, programs: Path, kind: RouterKind) -> Iterator[tuple[int, int]]:
    """Ports of the router and of its worker, once a request goes through. Raises PeerError if none does."""
    HOME.mkdir(exist_ok=True)
    children = Children(lambda _name, _line: None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            port_file = Path(folder, "worker")
            stub = [sys.executable, "-m", "bench.peers.openai_stub", "--port-file", str(port_file)]
            children.start("worker", stub)
            _wait("its worker", port_file.exists)
            worker = int(port_file.read_text())
            ports = {"port": str(_free_port()), "worker": str(worker), "metrics": str(_free_port())}
            program, *flags = (part.format(**ports) for part in kind.command)
            child = children.start(name, [str(programs / program), *flags])
            try:
                _wait(name, lambda: _answers(int(ports["port"]), child))
            except PeerError as error:
                raise PeerError(f"{error}: {' '.join(child.last_lines)[-500:]}") from error
            yield int(ports["port"]), worker
    finally:
        children.stop(5.0)


def _answers(port: int, child: Child) -> bool:
    """A request goes through: health is answered before a worker is known."""
    if child.exit_code is not None:
        raise PeerError(f"ended with code {child.exit_code}")

    async def ask() -> None:
        connection = await openai_load.Connection.open(port)
        try:
            await connection.complete(1)
        finally:
            connection.close()

    try:
        asyncio.run(asyncio.wait_for(ask(), 5.0))
    except (OSError, RuntimeError, ValueError, EOFError):
        return False
    return True


def _wait(what: str, is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_there():
        if time.monotonic() > deadline:
            raise PeerError(f"{what} was not ready within {START_SECONDS:g} s")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
