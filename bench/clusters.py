"""Workers of several GPUs behind a router, as `bench.multi_gpu` starts, asks and kills them."""

import asyncio
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from bench.common import Figure
from bench.cpu import run_service
from bench.peers.protocol import Job, Report
from fissile import Client
from fissile.cli.cluster import Cluster, ClusterConfig, running_cluster
from fissile.cli.processes import Child
from fissile.options import Options
from worker.local import LocalEngine
from worker.runner.config import RunnerConfig

START_SECONDS = 150.0
STEP_SECONDS = 60.0
"""Ranks that wait for each other without end are a fault, and are to cost no more of the machine's time."""
GONE_SECONDS = 60.0
DRAIN_SECONDS = 5.0

Figures = dict[str, Figure]


@dataclass(frozen=True)
class Plan:
    """What is run, at full size or `--quick`."""

    large: str
    small: str
    large_moe: str
    small_moe: str
    device: str
    num_devices: int
    dtype: str
    batches: tuple[int, ...]
    moe_batches: tuple[int, ...]
    """For each worker."""
    lengths: tuple[int, int]
    """Tokens in and out."""
    dp_requests: int
    """For each worker."""
    repeats: int
    moe_repeats: int
    max_model_len: int

    @property
    def tp_sizes(self) -> list[int]:
        return [size for size in (2, 4) if size <= self.num_devices]

    @property
    def half(self) -> int:
        """Devices of each of two workers."""
        return max(1, self.num_devices // 2)

    @property
    def max_num_seqs(self) -> int:
        return max(*self.batches, *self.moe_batches, self.dp_requests)


@contextmanager
def cluster_of(
    plan: Plan, model: os.PathLike[str], num_workers: int, tp_size: int, dtype: str, *arguments: str,
    share_experts: bool = False,
) -> Iterator[Cluster]:  # fmt: skip
    """Workers of `tp_size` devices each, behind a router, in the order of their data-parallel ranks if they share
    experts."""
    given = (
        "--device", plan.device, "--dtype", dtype, "--tensor-parallel-size", str(tp_size),
        "--max-num-seqs", str(plan.max_num_seqs), "--max-model-len", str(plan.max_model_len),
        "--step-timeout", str(STEP_SECONDS), "--no-enable-prefix-caching", *arguments,
    )  # fmt: skip
    environments: list[dict[str, str]] = [{} for _ in range(num_workers)]
    if plan.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(plan.num_devices)))).split(",")
        for number, environment in enumerate(environments):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[number * tp_size : (number + 1) * tp_size])
    if share_experts:
        given += ("--expert-parallel", "--dp-size", str(num_workers), "--dp-port", str(_free_port()))
        secret = secrets.token_hex()
        for number, environment in enumerate(environments):
            environment |= {"FISSILE_WORKER_DP_RANK": str(number), "FISSILE_WORKER_RANKS_SECRET": secret}
    config = ClusterConfig(
        num_workers, 0, str(model), given, worker_environments=tuple(environments), start_timeout=START_SECONDS,
        drain_timeout=DRAIN_SECONDS,
    )  # fmt: skip
    with running_cluster(config, _print_of_worker) as cluster:
        yield cluster


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _print_of_worker(name: str, line: str) -> None:
    if any(mark in line for mark in (" worker.", "Error", "Fatal", "hread", "File ")):
        print(f"{name}: {line}", flush=True)


@contextmanager
def ended_when_stuck(seconds: float) -> Iterator[Callable[[], None]]:
    """What it yields is called at each sign of progress. After so many seconds without one all ranks print where they
    stand, and end: whoever waits for them learns of that."""
    is_over, last = threading.Event(), time.monotonic()

    def progress() -> None:
        nonlocal last
        last = time.monotonic()

    def watch() -> None:
        while not is_over.wait(1.0):
            if time.monotonic() - last > seconds:
                print(f"no figure for {seconds:.0f} s: the ranks stand here", flush=True)
                for rank in ranks_of(os.getpid()):
                    rank.send_signal(signal.SIGABRT)  # `faulthandler` is on in them
                progress()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield progress
    finally:
        is_over.set()


def ranks_of(pid: int) -> list[psutil.Process]:
    """Rank processes under this one, the oldest first."""
    found = [one for one in psutil.Process(pid).children(recursive=True) if is_rank(one)]
    return sorted(found, key=lambda process: process.pid)


def is_rank(process: psutil.Process) -> bool:
    """A compiler that a rank has started may end while it is looked at, or wait for the rank to see that it did."""
    try:
        return "worker.runner.process" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


# --- tokens


def open_stream(client: Client, prompt: list[int], num_tokens: int, dp_rank: int | None = None):
    pinned: Options = {} if dp_rank is None else {"dp_rank": dp_rank}
    return client.generate(
        prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, return_token_ids=True, **pinned
    )


def rest_of(stream) -> list[int]:
    return [token for delta in stream for token in delta.token_ids]


def tokens_of_one(plan: Plan, model: os.PathLike[str], num_devices: int, prompts: list[list[int]]) -> list[list[int]]:
    """What all others are compared with: an engine alone, in float32."""
    config = RunnerConfig(
        model=str(model), device=plan.device, dtype="float32", tensor_parallel_size=num_devices,
        max_num_seqs=plan.max_num_seqs, max_model_len=plan.max_model_len,
    )  # fmt: skip
    with LocalEngine(config) as engine:
        return engine.generate(prompts, plan.lengths[1]).token_ids


def tokens_of(cluster: Cluster, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Of all prompts at once."""
    with Client(cluster.router_address) as client:
        streams = [open_stream(client, prompt, num_tokens) for prompt in prompts]
        return [rest_of(stream) for stream in streams]


def share_equal(found: list[list[int]], expected: list[list[int]]) -> float:
    return round(sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected), 3)


# --- the end of a rank


def kill_last_rank(worker: int) -> float:
    """When it was killed."""
    ranks_of(worker)[-1].kill()
    return time.monotonic()


def seconds_until_gone(workers: Sequence[Child], begin: float) -> float:
    """All of them. Raises RuntimeError."""
    while left := [worker.name for worker in workers if worker.exit_code is None]:
        if time.monotonic() - begin > GONE_SECONDS:
            raise RuntimeError(f"a rank is gone, and {', '.join(left)} lives on")
        time.sleep(0.01)
    return round(time.monotonic() - begin, 2)


# --- speed


def service_speed(
    clients: ProcessPoolExecutor, cluster: Cluster, jobs: Sequence[Job], *, are_pinned: bool = False
) -> float:
    """Output tokens per second of all jobs, each of a client process. Pinned: each at a worker of its own."""
    ranks = range(len(jobs)) if are_pinned else [None] * len(jobs)
    reports = list(clients.map(_ask, [cluster.router_address] * len(jobs), jobs, ranks))
    return sum(report.num_tokens for report in reports) / max(report.seconds for report in reports)


def _ask(address: str, job: Job, dp_rank: int | None) -> Report:
    return asyncio.run(run_service(address, job, dp_rank))
