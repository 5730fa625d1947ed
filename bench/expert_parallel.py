"""Two workers that hold half of a model's experts each and make every step together, against one that holds all of
them: tokens and speed of unequal work, and the end of a rank."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from bench.clusters import (
    Figures,
    Plan,
    cluster_of,
    kill_last_rank,
    open_stream,
    rest_of,
    seconds_until_gone,
    service_speed,
    share_equal,
    tokens_of_one,
)
from bench.common import median, ratio
from bench.models import write_model
from bench.peers.protocol import Job
from fissile import Client
from fissile.cli.cluster import Cluster

NUM_BUSY, NUM_LATE = 8, 3
"""Streams of the one worker, at once, and of the other, one after another."""
WARM_UP_TOKENS = 8


def ep_figures(plan: Plan, folder: Path) -> Iterator[Figures]:
    yield from token_figures(plan, write_model(plan.small_moe, folder / "small", weights=True))
    yield from speed_figures(plan, write_model(plan.large_moe, folder / "large"))


def token_figures(plan: Plan, model: Path) -> Iterator[Figures]:
    """Of a stored model in float32: tokens are compared one by one."""
    num_tokens = plan.lengths[1]
    prompts = Job(NUM_BUSY + NUM_LATE, 40, num_tokens, seed=2).prompts()
    expected = tokens_of_one(plan, model, plan.half, prompts)
    with cluster_of(plan, model, 2, plan.half, "float32", share_experts=True) as cluster:
        yield {"ep2_tokens_equal": share_equal(tokens_of_unequal(cluster, prompts, num_tokens), expected)}
        yield {"ep2_killed_gone_s": killed_beside_an_idle_one(cluster, prompts[0])}


def tokens_of_unequal(cluster: Cluster, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """One worker has the most of them, all at once. The other has none, then one, then another, of which the last ones
    go on when the first worker has none any more."""
    with Client(cluster.router_address) as client:
        busy = [open_stream(client, prompt, num_tokens, dp_rank=0) for prompt in prompts[:NUM_BUSY]]
        found = [list(next(stream).token_ids) for stream in busy]
        late = [rest_of(open_stream(client, prompt, num_tokens, dp_rank=1)) for prompt in prompts[NUM_BUSY:]]
        return [tokens + rest_of(stream) for tokens, stream in zip(found, busy, strict=True)] + late


def killed_beside_an_idle_one(cluster: Cluster, prompt: list[int]) -> float:
    """Seconds from the end of a rank of the worker that has nothing to do to that of both workers."""
    busy, idle = cluster.workers
    with Client(cluster.router_address) as client:
        stream = open_stream(client, prompt, 400, dp_rank=0)
        next(stream)
        begin = kill_last_rank(idle.pid)
        seconds = seconds_until_gone((busy, idle), begin)
        stream.close()
    return seconds


def speed_figures(plan: Plan, model: Path) -> Iterator[Figures]:
    """Through the router, of random weights: requests for each worker, then for one of the two alone."""
    alone: dict[int, float] = {}
    dummy = "--load-format", "dummy"
    with ProcessPoolExecutor(2, get_context("spawn")) as clients:
        with cluster_of(plan, model, 1, plan.half, plan.dtype, *dummy) as cluster:
            for number in plan.moe_batches:
                alone[number] = speed(clients, cluster, plan, [number])
                yield {f"ep1_service_tok_s_{number}": alone[number]}
        with cluster_of(plan, model, 2, plan.half, plan.dtype, *dummy, share_experts=True) as cluster:
            for number in plan.moe_batches:
                both = speed(clients, cluster, plan, [number, number])
                yield {f"ep2_service_tok_s_{number}": both, f"ep2_ratio_{number}": ratio(both, alone[number])}
            number = plan.moe_batches[1]
            one = speed(clients, cluster, plan, [number])
            yield {f"ep2_one_busy_tok_s_{number}": one, f"ep2_one_busy_ratio_{number}": ratio(one, alone[number])}


def speed(clients: ProcessPoolExecutor, cluster: Cluster, plan: Plan, numbers: list[int]) -> float:
    """Median, with so many requests at each worker; those not named have none."""
    num_in, num_out = plan.lengths

    def run(seed: int, length: int) -> float:
        jobs = [Job(number, num_in, length, seed * len(numbers) + i) for i, number in enumerate(numbers)]
        return service_speed(clients, cluster, jobs, are_pinned=True)

    run(99, WARM_UP_TOKENS)
    return median([run(seed, num_out) for seed in range(plan.moe_repeats)], 1)
