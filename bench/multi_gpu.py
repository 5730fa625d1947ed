"""Several GPUs of one host: tensor and data parallelism behind a router, against one GPU; and what a killed rank does.

Takes all GPUs it finds: TP 2 and 4, two workers of half of them each. Two models with random weights
(`bench/models.py`): a large one in bf16, not stored, for speed; a small one, stored, in float32, for tokens, which
are compared one by one. Expert parallelism is not part of it yet.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import psutil
import torch

from bench.all_reduce import all_reduce_figures
from bench.common import Figure, finish, median, parse_arguments, ratio
from bench.cpu import run_service
from bench.models import write_model
from bench.peers.protocol import Job, Report
from fissile import Client
from fissile.cli.cluster import Cluster, ClusterConfig, running_cluster
from worker.local import LocalEngine
from worker.runner.config import RunnerConfig

PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "fissile")
GONE_SECONDS = 60.0
NUM_STREAMS = 4


@dataclass(frozen=True)
class Plan:
    large: str
    small: str
    device: str
    num_devices: int
    dtype: str
    batches: tuple[int, ...]
    lengths: tuple[int, int]
    """Tokens in and out."""
    dp_requests: int
    """For each worker."""
    repeats: int
    max_model_len: int

    @property
    def tp_sizes(self) -> list[int]:
        return [size for size in (2, 4) if size <= self.num_devices]

    @property
    def max_num_seqs(self) -> int:
        return max(*self.batches, self.dp_requests)


def main() -> None:
    quick = parse_arguments(__doc__).quick
    num_gpus = torch.cuda.device_count()
    if not quick and num_gpus < 2:
        raise SystemExit(f"bench-multi-gpu needs two NVIDIA GPUs, here are {num_gpus} (ARGS=--quick: CPUs)")
    plan = (
        Plan("tiny", "tiny", "cpu", 2, "float32", (1, 4), (16, 8), 4, 1, 512)
        if quick
        else Plan("qwen3-8b", "qwen3-0.6b", "cuda", num_gpus, "bfloat16", (1, 64), (128, 256), 256, 3, 2048)
    )
    folder = Path(tempfile.mkdtemp(prefix="fissile-bench-"))
    figures: dict[str, Figure] = {}
    try:
        figures |= shown(all_reduce_figures(2, is_gpu=plan.device == "cuda"))
        figures |= token_figures(plan, write_model(plan.small, folder / "small", weights=True))
        large = write_model(plan.large, folder / "large")
        figures |= tp_figures(plan, large)
        figures |= dp_figures(plan, large)
    finally:
        shutil.rmtree(folder)
    card = f"{plan.num_devices} × {torch.cuda.get_device_name()}" if plan.device == "cuda" else "cpu"
    finish("multi_gpu", figures, quick=quick, dtype=plan.dtype, device=card, packages=PACKAGES)


def shown(figures: dict[str, Figure]) -> dict[str, Figure]:
    print(figures, flush=True)
    return figures


# --- tokens, and killed ranks


def token_figures(plan: Plan, model: Path) -> dict[str, Figure]:
    """The same tokens from every number of ranks, and from a stream that moved; how soon a worker is gone."""
    figures: dict[str, Figure] = {}
    prompts = Job(NUM_STREAMS, 40, plan.lengths[1], seed=1).prompts()
    with cluster_of(plan, model, 1, 1, "float32") as cluster:
        expected = tokens_of(cluster, prompts, plan.lengths[1])
    for size in plan.tp_sizes:
        with cluster_of(plan, model, 1, size, "float32") as cluster:
            found = tokens_of(cluster, prompts, plan.lengths[1])
            figures[f"tp{size}_tokens_equal"] = share_equal(found, expected)
            figures[f"tp{size}_killed_gone_s"] = killed_alone(cluster, prompts[0])
        shown(figures)
    with cluster_of(plan, model, 2, max(1, plan.num_devices // 2), "float32") as cluster:
        return shown(figures | killed_beside_another(cluster, prompts, expected))


def tokens_of(cluster: Cluster, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    with Client(cluster.router_address) as client:
        streams = [open_stream(client, prompt, num_tokens) for prompt in prompts]
        return [[token for delta in stream for token in delta.token_ids] for stream in streams]


def open_stream(client: Client, prompt: list[int], num_tokens: int):
    return client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, return_token_ids=True)


def share_equal(found: list[list[int]], expected: list[list[int]]) -> float:
    return round(sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected), 3)


def killed_alone(cluster: Cluster, prompt: list[int]) -> float:
    """Seconds from the end of the last rank to that of its worker, while the other ranks wait for it."""
    (worker,) = cluster.workers
    with Client(cluster.router_address) as client:
        stream = open_stream(client, prompt, 400)
        next(stream)
        begin = kill_last_rank(worker.pid)
        seconds = seconds_until_gone(worker, begin)
        stream.close()
    return seconds


def killed_beside_another(cluster: Cluster, prompts: list[list[int]], expected: list[list[int]]) -> dict[str, Figure]:
    """Streams of the worker that ends go on at the other one."""
    victim = next(iter(cluster.workers))
    with Client(cluster.router_address) as client:
        streams = [open_stream(client, prompt, len(tokens)) for prompt, tokens in zip(prompts, expected, strict=True)]
        found = [list(next(stream).token_ids) for stream in streams]
        begin = kill_last_rank(victim.pid)
        for stream, tokens in zip(streams, found, strict=True):
            for delta in stream:
                tokens += delta.token_ids
        seconds = seconds_until_gone(victim, begin)
    return {"dp2_killed_gone_s": seconds, "dp2_resumed_tokens_equal": share_equal(found, expected)}


def kill_last_rank(worker: int) -> float:
    """When it was killed."""
    ranks = [process for process in psutil.Process(worker).children() if "worker.runner.process" in process.cmdline()]
    max(ranks, key=lambda process: process.pid).kill()
    return time.monotonic()


def seconds_until_gone(worker, begin: float) -> float:
    while worker.exit_code is None:
        if time.monotonic() - begin > GONE_SECONDS:
            raise SystemExit(f"{worker.name} has lost a rank and lives on")
        time.sleep(0.01)
    return round(time.monotonic() - begin, 2)


# --- speed


def tp_figures(plan: Plan, model: Path) -> dict[str, Figure]:
    """The engine alone, by the number of ranks."""
    figures: dict[str, Figure] = {}
    for size in [1, *plan.tp_sizes]:
        config = RunnerConfig(
            model=str(model), load_format="dummy", device=plan.device, dtype=plan.dtype,  # type: ignore[arg-type]
            tensor_parallel_size=size, max_num_seqs=plan.max_num_seqs, max_model_len=plan.max_model_len,
        )  # fmt: skip
        begin = time.perf_counter()
        with LocalEngine(config, log_level="info") as engine:
            figures[f"tp{size}_ready_s"] = round(time.perf_counter() - begin, 2)
            for number in plan.batches:
                figures |= engine_figures(plan, engine, size, number)
                figures[f"tp{size}_ratio_{number}"] = ratio_of(figures, size, number)
        shown(figures)
    return figures


def engine_figures(plan: Plan, engine: LocalEngine, size: int, number: int) -> dict[str, Figure]:
    def run(seed: int, length: int):
        return engine.generate(Job(number, plan.lengths[0], length, seed).prompts(), length, async_depth=1)

    run(99, 8)
    runs = [run(seed, plan.lengths[1]) for seed in range(plan.repeats)]
    steps = [seconds * 1e3 for run in runs for seconds in run.decode_step_seconds]
    return {
        f"tp{size}_tok_s_{number}": median([run.tokens_per_second for run in runs], 1),
        f"tp{size}_decode_step_ms_{number}": median(steps, 3),
    }


def ratio_of(figures: dict[str, Figure], size: int, number: int) -> float | None:
    one = figures[f"tp1_tok_s_{number}"]
    return ratio(float(figures[f"tp{size}_tok_s_{number}"] or 0), float(one) if one else None)


def dp_figures(plan: Plan, model: Path) -> dict[str, Figure]:
    """Through the router, as many requests for each worker, and a client process for each."""
    size, number = max(1, plan.num_devices // 2), plan.dp_requests
    speeds: dict[int, float] = {}
    with ProcessPoolExecutor(2, get_context("spawn")) as clients:
        for num_workers in (1, 2):
            with cluster_of(plan, model, num_workers, size, plan.dtype, "--load-format", "dummy") as cluster:
                runs = [service_speed(clients, cluster, plan, num_workers, seed) for seed in range(plan.repeats + 1)]
            speeds[num_workers] = median(runs[1:], 1)
    return shown({
        f"dp1_service_tok_s_{number}": speeds[1],
        f"dp2_service_tok_s_{number}": speeds[2],
        f"dp2_ratio_{number}": ratio(speeds[2], speeds[1]),
    })  # fmt: skip


def service_speed(clients: ProcessPoolExecutor, cluster: Cluster, plan: Plan, num_workers: int, seed: int) -> float:
    jobs = [Job(plan.dp_requests, *plan.lengths, seed=seed * num_workers + i) for i in range(num_workers)]
    reports = list(clients.map(ask, [cluster.router_address] * num_workers, jobs))
    return sum(report.num_tokens for report in reports) / max(report.seconds for report in reports)


def ask(address: str, job: Job) -> Report:
    return asyncio.run(run_service(address, job))


@contextmanager
def cluster_of(
    plan: Plan, model: Path, num_workers: int, tp_size: int, dtype: str, *arguments: str
) -> Iterator[Cluster]:
    """Workers of `tp_size` devices each, behind a router."""
    given = (
        "--device", plan.device, "--dtype", dtype, "--tensor-parallel-size", str(tp_size),
        "--max-num-seqs", str(plan.max_num_seqs), "--max-model-len", str(plan.max_model_len),
        "--no-enable-prefix-caching", *arguments,
    )  # fmt: skip
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(plan.num_devices)))).split(",")
    environments = tuple(
        {"CUDA_VISIBLE_DEVICES": ",".join(visible[number * tp_size : (number + 1) * tp_size])}
        for number in range(num_workers if plan.device == "cuda" else 0)
    )
    config = ClusterConfig(num_workers, 0, str(model), given, worker_environments=environments)
    with running_cluster(config, print_of_worker) as cluster:
        yield cluster


def print_of_worker(name: str, line: str) -> None:
    if " worker." in line or "Error" in line:
        print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
