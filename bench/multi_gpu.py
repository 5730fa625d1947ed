"""Several GPUs of one host: tensor, data and expert parallelism behind a router, against one GPU; and what a killed
rank does.

Takes all GPUs it finds: TP 2 and 4, two workers of half of them each. Models with random weights (`bench/models.py`):
large ones in bf16, not stored, for speed; small ones, stored, in float32, for tokens, which are compared one by one.
A part that fails is named at the end, and costs the figures of no other.
"""

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from bench.all_reduce import all_reduce_figures
from bench.clusters import (
    Figures,
    Plan,
    cluster_of,
    ended_when_stuck,
    kill_last_rank,
    open_stream,
    rest_of,
    seconds_until_gone,
    service_speed,
    share_equal,
    tokens_of,
    tokens_of_one,
)
from bench.common import Figure, finish, median, parse_arguments, ratio
from bench.expert_parallel import ep_figures
from bench.models import write_model
from bench.peers.protocol import Job
from fissile import Client
from fissile.cli.cluster import Cluster
from worker.local import LocalEngine, Run
from worker.runner.config import RunnerConfig

PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "fissile")
NUM_STREAMS = 4
STUCK_SECONDS = 120.0
"""Without a figure."""
QUICK = Plan(
    "tiny", "tiny", "tiny-moe", "tiny-moe", "cpu", 2, "float32", (1, 4), (1, 4), (16, 8), 4, repeats=1,
    moe_repeats=1, max_model_len=512,
)  # fmt: skip

Part = Callable[[Plan, Path], Iterator[Figures]]
"""Yields figures as it has them; the folder is its own."""


def main() -> None:
    arguments = parse_arguments(__doc__, parts=tuple(PARTS))
    plan = QUICK if arguments.quick else full_plan(torch.cuda.device_count())
    figures, failed = run_parts(plan, arguments.parts)
    card = f"{plan.num_devices} × {torch.cuda.get_device_name()}" if plan.device == "cuda" else "cpu"
    finish("multi_gpu", figures, quick=arguments.quick, dtype=plan.dtype, device=card, packages=PACKAGES)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def full_plan(num_gpus: int) -> Plan:
    if num_gpus < 2:
        raise SystemExit(f"bench-multi-gpu needs two NVIDIA GPUs, here are {num_gpus} (ARGS=--quick: CPUs)")
    return Plan(
        "qwen3-8b", "qwen3-0.6b", "qwen3-30b-a3b", "small-moe", "cuda", num_gpus, "bfloat16", (1, 64), (1, 64, 256),
        (128, 256), 256, repeats=3, moe_repeats=2, max_model_len=2048,
    )  # fmt: skip


def run_parts(plan: Plan, names: Sequence[str]) -> tuple[dict[str, Figure], list[str]]:
    """The figures, printed as they come, and which parts have failed."""
    figures: dict[str, Figure] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fissile-bench-") as folder:
        for name in names:
            begin = time.monotonic()
            try:
                with ended_when_stuck(STUCK_SECONDS) as progress:
                    for found in PARTS[name](plan, Path(folder) / name):
                        print(found, flush=True)
                        figures |= found
                        progress()
            except Exception:
                traceback.print_exc()
                failed.append(name)
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return figures, failed


# --- sums


def sum_figures(plan: Plan, _: Path) -> Iterator[Figures]:
    yield all_reduce_figures(2, is_gpu=plan.device == "cuda")


# --- tokens, and killed ranks


def token_figures(plan: Plan, folder: Path) -> Iterator[Figures]:
    """The same tokens from every number of ranks, and from a stream that moved; how soon a worker is gone."""
    model = write_model(plan.small, folder, weights=True)
    prompts = Job(NUM_STREAMS, 40, plan.lengths[1], seed=1).prompts()
    expected = tokens_of_one(plan, model, 1, prompts)
    for size in plan.tp_sizes:
        with cluster_of(plan, model, 1, size, "float32") as cluster:
            found = tokens_of(cluster, prompts, plan.lengths[1])
            yield {f"tp{size}_tokens_equal": share_equal(found, expected)}
            yield {f"tp{size}_killed_gone_s": killed_alone(cluster, prompts[0])}
    with cluster_of(plan, model, 2, plan.half, "float32") as cluster:
        yield killed_beside_another(cluster, prompts, expected)


def killed_alone(cluster: Cluster, prompt: list[int]) -> float:
    """Seconds from the end of the last rank to that of its worker, while the other ranks wait for it."""
    (worker,) = cluster.workers
    with Client(cluster.router_address) as client:
        stream = open_stream(client, prompt, 400)
        next(stream)
        seconds = seconds_until_gone([worker], kill_last_rank(worker.pid))
        stream.close()
    return seconds


def killed_beside_another(cluster: Cluster, prompts: list[list[int]], expected: list[list[int]]) -> Figures:
    """Streams of the worker that ends go on at the other one."""
    victim = next(iter(cluster.workers))
    with Client(cluster.router_address) as client:
        streams = [open_stream(client, prompt, len(tokens)) for prompt, tokens in zip(prompts, expected, strict=True)]
        found = [list(next(stream).token_ids) for stream in streams]
        begin = kill_last_rank(victim.pid)
        found = [tokens + rest_of(stream) for tokens, stream in zip(found, streams, strict=True)]
        seconds = seconds_until_gone([victim], begin)
    return {"dp2_killed_gone_s": seconds, "dp2_resumed_tokens_equal": share_equal(found, expected)}


# --- speed


def tp_figures(plan: Plan, folder: Path) -> Iterator[Figures]:
    """The engine alone, by the number of ranks."""
    model = write_model(plan.large, folder)
    alone: dict[int, float] = {}
    for size in [1, *plan.tp_sizes]:
        config = RunnerConfig(
            model=str(model), load_format="dummy", device=plan.device, dtype=plan.dtype,  # type: ignore[arg-type]
            tensor_parallel_size=size, max_num_seqs=plan.max_num_seqs, max_model_len=plan.max_model_len,
        )  # fmt: skip
        begin = time.perf_counter()
        with LocalEngine(config, log_level="info") as engine:
            yield {f"tp{size}_ready_s": round(time.perf_counter() - begin, 2)}
            for number in plan.batches:
                speed, step_ms = engine_speed(plan, engine, number)
                yield {
                    f"tp{size}_tok_s_{number}": speed,
                    f"tp{size}_decode_step_ms_{number}": step_ms,
                    f"tp{size}_ratio_{number}": ratio(speed, alone.setdefault(number, speed)),
                }


def engine_speed(plan: Plan, engine: LocalEngine, number: int) -> tuple[float, float]:
    """(output tokens per second, milliseconds of a decode step)"""

    def run(seed: int, length: int) -> Run:
        return engine.generate(Job(number, plan.lengths[0], length, seed).prompts(), length, async_depth=1)

    run(99, 8)
    runs = [run(seed, plan.lengths[1]) for seed in range(plan.repeats)]
    steps = [seconds * 1e3 for run in runs for seconds in run.decode_step_seconds]
    return median([run.tokens_per_second for run in runs], 1), median(steps, 3)


def dp_figures(plan: Plan, folder: Path) -> Iterator[Figures]:
    """Through the router, as many requests for each worker, and a client process for each."""
    model, number = write_model(plan.large, folder), plan.dp_requests
    speeds: dict[int, float] = {}
    with ProcessPoolExecutor(2, get_context("spawn")) as clients:
        for num_workers in (1, 2):
            with cluster_of(plan, model, num_workers, plan.half, plan.dtype, "--load-format", "dummy") as cluster:
                runs = [
                    service_speed(clients, cluster, [
                        Job(number, *plan.lengths, seed=seed * num_workers + i) for i in range(num_workers)
                    ])
                    for seed in range(plan.repeats + 1)
                ]  # fmt: skip
            speeds[num_workers] = median(runs[1:], 1)
            yield {f"dp{num_workers}_service_tok_s_{number}": speeds[num_workers]}
    yield {f"dp2_ratio_{number}": ratio(speeds[2], speeds[1])}


PARTS: dict[str, Part] = {
    "sums": sum_figures,
    "tokens": token_figures,
    "tp": tp_figures,
    "dp": dp_figures,
    "ep": ep_figures,
}


if __name__ == "__main__":
    main()
