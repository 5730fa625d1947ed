"""Sums over the ranks of one host, as layers ask for them: how long one takes inside a graph, and that it is right."""

import faulthandler
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from queue import Queue

import torch
import torch.distributed as dist
from torch import Tensor

from bench.common import Figure
from worker.parallel.group import Group
from worker.parallel.symmetric import symmetric_sums

HIDDEN_SIZE = 4096
ROWS = (1, 8, 64, 256, 1024)
SUMS_A_GRAPH = 72
"""Of a model of 36 layers."""
REPLAYS = {"cuda": 20, "cpu": 2}
MAX_SECONDS = 90.0
"""Of a rank: after that it says where it stands, and ends."""


def all_reduce_figures(size: int, *, is_gpu: bool) -> dict[str, Figure]:
    """`all_reduce_us_ROWS` as a group of so many ranks does it, `library_all_reduce_us_ROWS` by the library alone."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="fissile-bench-") as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, size, is_gpu, Path(folder) / "store", answers), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        while (alive := [process for process in ranks if process.is_alive()]) and not any(r.exitcode for r in ranks):
            wait([process.sentinel for process in alive])
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
        for process in ranks:
            process.kill()  # whoever is left waits for the one that failed
    if failed:
        raise RuntimeError(f"all-reduce: rank {failed[0]} failed")
    return answers.get()


def _rank(rank: int, size: int, is_gpu: bool, store: Path, answers: "Queue[dict[str, Figure]]") -> None:
    faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size,
        device_id=device if is_gpu else None,
    )  # fmt: skip
    world = dist.group.WORLD
    library = Group(rank, size, world)
    ours = Group(rank, size, world, symmetric_sums(world, device, is_one_host=True))
    figures: dict[str, Figure] = {}
    with torch.inference_mode():
        for rows in ROWS if is_gpu else ROWS[:1]:
            check(ours, rows, device)
            for name, group in (("library_all_reduce", library), ("all_reduce", ours)):
                figures[f"{name}_us_{rows}"] = round(_microseconds(group, rows, device), 1)
    if rank == 0:
        answers.put(figures)
    dist.destroy_process_group()


def check(group: Group, rows: int, device: torch.device) -> None:
    """Sums that follow each other closely, each of other numbers: none may see those of another."""
    given = torch.arange(SUMS_A_GRAPH, device=device) % 7 + group.rank
    totals: list[Tensor] = []

    def run() -> None:
        for number in range(SUMS_A_GRAPH):
            totals.append(_sum(group, given[number].to(torch.bfloat16).expand(rows, HIDDEN_SIZE)).clone())

    play = _recorded(run, device)
    expected = (torch.arange(SUMS_A_GRAPH, device=device) % 7) * group.size + group.size * (group.size - 1) // 2
    for _ in range(REPLAYS[device.type]):
        play()
        for total, value in zip(totals[-SUMS_A_GRAPH:], expected, strict=True):
            assert bool((total == value).all()), f"rank {group.rank}: a wrong sum of {rows} rows"


def _sum(group: Group, part: Tensor) -> Tensor:
    """As a row-parallel product leaves its part."""
    place = group.place(*part.shape, dtype=part.dtype)
    return group.all_reduce(part.contiguous() if place is None else place.copy_(part))


def _microseconds(group: Group, rows: int, device: torch.device) -> float:
    """Of one sum; those of a graph follow each other without anything between them."""
    x = group.place(rows, HIDDEN_SIZE, dtype=torch.bfloat16)
    part = torch.zeros(rows, HIDDEN_SIZE, dtype=torch.bfloat16, device=device) if x is None else x.zero_()

    def run() -> None:
        for _ in range(SUMS_A_GRAPH):
            group.all_reduce(part)

    play = _recorded(run, device)
    play()
    best = float("inf")
    for _ in range(REPLAYS[device.type]):
        _wait(device)
        dist.barrier(group=group.handle)
        begin = time.perf_counter()
        play()
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    return best / SUMS_A_GRAPH * 1e6


def _recorded(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What plays `run` again: a graph on a GPU."""
    if device.type == "cpu":
        return run
    run()
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
