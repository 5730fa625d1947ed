"""One GPU in bf16: output tokens per second, times to first token, start-up; by the engine, and through the service.

Models of real sizes with random weights (`bench/models.py`), greedy, random prompts, no prefix cache. Loads: n
requests at once, IN tokens in, OUT tokens out.
"""

import asyncio
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.bandwidth import GIB, copy_bandwidth
from bench.common import Figure, finish, median, parse_arguments
from bench.cpu import run_service
from bench.models import CONFIGS, num_bytes_read, write_model
from bench.peers.protocol import Job
from bench.sampling import FEATURES, stop_after
from fissile.cli.cluster import ClusterConfig, running_cluster
from worker.local import GREEDY, LocalEngine, Run
from worker.runner.config import RunnerConfig

PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "fissile")
PAUSE = 1.0
"""Seconds before a request that comes alone."""


@dataclass(frozen=True)
class Load:
    num_requests: int
    input_length: int
    output_length: int
    repeats: int


@dataclass(frozen=True)
class Plan:
    """What is run, at full size or `--quick`."""

    large: str
    small: str
    device: str
    dtype: str
    loads: tuple[Load, ...]
    service_loads: tuple[Load, ...]
    prefills: tuple[int, ...]
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    features: Load
    moe: str
    moe_loads: tuple[Load, ...]
    moe_prefills: tuple[int, ...]


FULL = Plan(
    large="qwen3-8b", small="qwen3-0.6b", device="cuda", dtype="bfloat16",
    loads=(Load(1, 128, 256, 3), Load(8, 128, 256, 3), Load(64, 128, 256, 3), Load(256, 128, 256, 3),
           Load(256, 1024, 256, 1)),
    service_loads=(Load(1, 128, 256, 2), Load(256, 128, 256, 3)),
    prefills=(1024, 8192), max_num_seqs=256, max_model_len=10240, max_num_batched_tokens=8192,
    features=Load(256, 128, 128, 1), moe="qwen3-30b-a3b",
    moe_loads=(Load(1, 128, 256, 1), Load(8, 128, 256, 1), Load(64, 128, 256, 1), Load(256, 128, 256, 1)),
    moe_prefills=(1024, 8192),
)  # fmt: skip
QUICK = Plan(
    large="tiny", small="tiny", device="auto", dtype="auto",
    loads=(Load(1, 16, 8, 1), Load(4, 16, 8, 1)), service_loads=(Load(4, 16, 8, 1),),
    prefills=(64,), max_num_seqs=4, max_model_len=512, max_num_batched_tokens=256, features=Load(4, 16, 8, 1),
    moe="tiny-moe", moe_loads=(Load(1, 16, 8, 1), Load(4, 16, 8, 1)), moe_prefills=(64,),
)  # fmt: skip


def main() -> None:
    arguments = parse_arguments(__doc__, moe="the mixture of experts alone")
    quick = arguments.quick
    if not quick and not torch.cuda.is_available():
        raise SystemExit("bench-gpu needs an NVIDIA GPU (ARGS=--quick: a tiny model on the CPU)")
    plan = QUICK if quick else FULL
    folder = Path(tempfile.mkdtemp(prefix="fissile-bench-"))
    # Whatever this machine has compiled before: all kernels at the first start, and none after that.
    os.environ["TRITON_CACHE_DIR"] = str(folder / "kernels")
    figures: dict[str, Figure] = {}
    try:
        if not arguments.moe:
            figures |= dense_figures(plan, folder)
        figures |= moe_figures(plan, write_model(plan.moe, folder / plan.moe))
    finally:
        shutil.rmtree(folder)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    finish("gpu", figures, quick=quick, dtype=plan.dtype, device=card, packages=PACKAGES)


def dense_figures(plan: Plan, folder: Path) -> dict[str, Figure]:
    large = write_model(plan.large, folder / plan.large)
    figures = first_start_figures(plan, large)
    figures |= engine_figures(plan, large)
    figures |= service_figures(plan, large, figures)
    figures |= small_figures(plan, write_model(plan.small, folder / "small"))
    return figures | disk_figures(plan, folder / "stored")


def runner_config(plan: Plan, model: Path, load_format: str = "dummy") -> RunnerConfig:
    return RunnerConfig(
        model=str(model), load_format=load_format, device=plan.device, dtype=plan.dtype,  # type: ignore[arg-type]
        max_num_seqs=plan.max_num_seqs, max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
    )  # fmt: skip


def random_prompts(plan: Plan, number: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    vocabulary = int(str(CONFIGS[plan.large]["vocab_size"]))
    return [[rng.randrange(2, vocabulary) for _ in range(length)] for _ in range(number)]


def first_start_figures(plan: Plan, model: Path) -> dict[str, Figure]:
    begin = time.perf_counter()
    with LocalEngine(runner_config(plan, model), log_level="info"):
        return {"ready_first_s": round(time.perf_counter() - begin, 2)}


def engine_figures(plan: Plan, model: Path) -> dict[str, Figure]:
    begin = time.perf_counter()
    with LocalEngine(runner_config(plan, model), log_level="info") as engine:
        figures: dict[str, Figure] = {"ready_dummy_s": round(time.perf_counter() - begin, 2)}
        print(f"ready in {figures['ready_dummy_s']} s, kernels {engine.model.kernels}", flush=True)
        for load in plan.loads:
            figures |= engine_load(plan, engine, load)
        figures |= prefill_figures(plan, engine, plan.prefills)
        figures |= feature_figures(plan, engine)
    return figures


def prefill_figures(plan: Plan, engine: LocalEngine, lengths: Sequence[int]) -> dict[str, Figure]:
    """Lone requests: each after a pause, in which the card cools down, as it does between requests that are alone, and
    in a row, which throttles it."""
    figures: dict[str, Figure] = {}
    for length in lengths:
        run_once(plan, engine, 1, length, 1, 0)
        for name, pause in (("", PAUSE), ("_in_a_row", 0.0)):
            seconds = []
            for seed in range(1, 6):
                time.sleep(pause)
                seconds.append(run_once(plan, engine, 1, length, 1, seed).seconds)
            figures[f"ttft_{length}_ms{name}"] = median([value * 1e3 for value in seconds])
    print(figures, flush=True)
    return figures


def moe_figures(plan: Plan, model: Path) -> dict[str, Figure]:
    """By the engine: a model of as many weights as fit on the device, of which a token reads a tenth."""
    figures: dict[str, Figure] = {}
    begin = time.perf_counter()
    with LocalEngine(runner_config(plan, model), log_level="info") as engine:
        figures["ready_dummy_s"] = round(time.perf_counter() - begin, 2)
        print(f"ready in {figures['ready_dummy_s']} s, kernels {engine.model.kernels}", flush=True)
        figures |= prefill_figures(plan, engine, plan.moe_prefills)
        for load in plan.moe_loads:
            figures |= engine_load(plan, engine, load)
    return {f"moe_{name}": figure for name, figure in figures.items()}


def run_once(plan: Plan, engine: LocalEngine, number: int, input_length: int, output_length: int, seed: int) -> Run:
    return engine.generate(random_prompts(plan, number, input_length, seed), output_length, async_depth=1)


def engine_load(plan: Plan, engine: LocalEngine, load: Load) -> dict[str, Figure]:
    name = load_name(load)
    run_once(plan, engine, load.num_requests, load.input_length, 8, 99)
    runs = [
        run_once(plan, engine, load.num_requests, load.input_length, load.output_length, seed)
        for seed in range(load.repeats)
    ]
    decode = [seconds * 1e3 for run in runs for seconds in run.decode_step_seconds]
    figures: dict[str, Figure] = {
        f"tok_s_{name}": median([run.tokens_per_second for run in runs], 1),
        f"decode_step_ms_{name}": median(decode, 3),
        f"step_gap_share_{name}": median([decode_gap_share(run, load.num_requests) for run in runs], 4),
    }
    print(figures, flush=True)
    return figures


def decode_gap_share(run: Run, number: int) -> float:
    """Share of the decode steps' time in which the device ran no step."""
    steps = [step for step in run.steps if step.batch.num_scheduled_tokens == [1] * number]
    return sum(step.gap_seconds for step in steps) / sum(step.step_seconds for step in steps)


def load_name(load: Load) -> str:
    return f"{load.num_requests}" if load.input_length <= 128 else f"{load.num_requests}x{load.input_length}"


def feature_figures(plan: Plan, engine: LocalEngine) -> dict[str, Figure]:
    """Median decode steps with every sampling feature on, over greedy."""
    load = plan.features
    every = {key: value for feature in FEATURES.values() for key, value in feature.items()}
    every["allowed_token_ids"] = tuple(range(3, int(str(CONFIGS[plan.large]["vocab_size"])) // 2))
    prompts = random_prompts(plan, load.num_requests, load.input_length, 5)
    steps: dict[str, float] = {}
    for name, features in (("greedy", {}), ("draw", FEATURES["draw"]), ("all_features", every)):
        rows = [replace(GREEDY, seed=i, **features) for i in range(load.num_requests)]  # type: ignore[arg-type]
        stop = stop_after(load.output_length, early=name == "all_features")
        for _ in range(2):
            run = engine.generate(prompts, load.output_length, async_depth=1, sampling=rows, stop=stop)
        steps[name] = median(run.decode_step_seconds, 6)
    number = load.num_requests
    figures: dict[str, Figure] = {f"{name}_step_ms_{number}": round(value * 1e3, 3) for name, value in steps.items()}
    for name in ("draw", "all_features"):
        figures[f"ratio_{name}_{number}"] = round(steps[name] / steps["greedy"], 3)
    print(figures, flush=True)
    return figures


def service_figures(plan: Plan, model: Path, engine: dict[str, Figure]) -> dict[str, Figure]:
    """The loads through router and worker, with one client process."""
    arguments = (
        "--load-format", "dummy", "--device", plan.device, "--dtype", plan.dtype,
        "--max-num-seqs", str(plan.max_num_seqs), "--max-model-len", str(plan.max_model_len),
        "--max-num-batched-tokens", str(plan.max_num_batched_tokens), "--no-enable-prefix-caching",
    )  # fmt: skip
    figures: dict[str, Figure] = {}
    begin = time.perf_counter()
    with running_cluster(ClusterConfig(1, 0, str(model), arguments), print_of_worker) as cluster:
        figures["service_ready_s"] = round(time.perf_counter() - begin, 2)
        for load in plan.service_loads:
            run = service_run(cluster.router_address, load)
            speeds = [run(seed) for seed in range(-1, load.repeats)][1:]
            name = load_name(load)
            figures[f"service_tok_s_{name}"] = median(speeds, 1)
            ours = engine[f"tok_s_{name}"]
            figures[f"service_ratio_{name}"] = round(median(speeds, 6) / float(ours or 1), 3)
            print({key: figures[f"{key}_{name}"] for key in ("service_tok_s", "service_ratio")}, flush=True)
    return figures


def print_of_worker(_name: str, line: str) -> None:
    if " worker." in line:
        print(line, flush=True)


def service_run(address: str, load: Load) -> Callable[[int], float]:
    def run(seed: int) -> float:
        job = Job(load.num_requests, load.input_length, load.output_length, seed)
        return asyncio.run(run_service(address, job)).tokens_per_second

    return run


def small_figures(plan: Plan, model: Path) -> dict[str, Figure]:
    """One request of the small model, against the limit of reading its weights once a token."""
    with LocalEngine(runner_config(plan, model)) as engine:
        run_once(plan, engine, 1, 16, 8, 0)
        runs = [run_once(plan, engine, 1, 16, plan.loads[0].output_length, seed) for seed in range(3)]
    step = median([seconds for run in runs for seconds in run.decode_step_seconds], 7)
    figures: dict[str, Figure] = {"small_tok_s_1": median([run.tokens_per_second for run in runs], 1)}
    if torch.cuda.is_available():
        bandwidth = copy_bandwidth(torch.device("cuda"))
        figures["copy_gb_s"] = round(bandwidth / 1e9)
        figures["small_share_of_limit_1"] = round(num_bytes_read(plan.small) / bandwidth / step, 3)
    return figures


def disk_figures(plan: Plan, folder: Path) -> dict[str, Figure]:
    """Start-up with weights that were written just now, and so are in the page cache."""
    write_model(plan.large, folder, weights=True)
    begin = time.perf_counter()
    with LocalEngine(runner_config(plan, folder, "safetensors"), log_level="info") as engine:
        seconds = round(time.perf_counter() - begin, 2)
        run_once(plan, engine, 1, 16, 4, 0)
        return {"ready_disk_s": seconds, "weights_gib": round(engine.model.memory.weights / GIB, 2)}


if __name__ == "__main__":
    main()
