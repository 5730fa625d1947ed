"""How the ranks that work together find each other: through a store of which one holds the listening socket."""

import os
import sys
from dataclasses import dataclass
from ipaddress import ip_address

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from worker.parallel.group import Group, Groups
from worker.parallel.symmetric import symmetric_sums
from worker.runner.config import RunnerConfig
from worker.runner.messages import Place, Setup


@dataclass(frozen=True, slots=True)
class Meeting:
    groups: Groups
    store: Store | None = None
    """Of all ranks; None for one that is alone."""


def meet(setup: Setup, place: Place, device: torch.device) -> Meeting:
    """The groups that this rank is in. Waits for all ranks. Raises ValueError where two have the same GPU."""
    config = setup.config
    num_tp, size = config.tensor_parallel_size, config.tensor_parallel_size * config.dp_size
    if size == 1:
        return Meeting(Groups())
    host = setup.store_host or place.store_host
    if _is_loopback(host) and sys.platform == "linux":
        # All ranks are here: what they say stays here, whatever the host's name leads to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, setup.store_port, size, is_master=place.store_fd is not None, wait_for_workers=False,
        master_listen_fd=place.store_fd,
    )  # fmt: skip
    backend = "gloo" if device.type == "cpu" else "nccl"
    # A GPU's communicators are made at once: while a graph is captured, it would be too late.
    device_id = device if device.type == "cuda" else None
    rank = config.dp_rank * num_tp + setup.rank
    if device.type == "cuda":
        refuse_shared_gpus(store, rank, size, str(torch.cuda.get_device_properties(device).uuid))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
    is_one_host = place.num_local_ranks == num_tp
    return Meeting(_groups(config, setup.rank, device, is_one_host=is_one_host), store)


def refuse_shared_gpus(store: Store, rank: int, size: int, gpu: str) -> None:
    """Called by all ranks, each with what no other GPU of any host is called. Raises ValueError, on all of them."""
    store.set(f"gpu/{rank}", gpu)
    holders: dict[str, int] = {}
    for other in range(size):
        first = holders.setdefault(store.get(f"gpu/{other}").decode(), other)
        if first != other:
            raise ValueError(
                f"ranks {first} and {other} of all {size} have the same GPU: each worker on a host needs GPUs of its "
                "own, which CUDA_VISIBLE_DEVICES names"
            )


def _groups(config: RunnerConfig, rank: int, device: torch.device, *, is_one_host: bool) -> Groups:
    """`rank`: among those of its worker."""
    world = dist.group.WORLD
    assert world is not None
    num_tp, num_dp, dp_rank = config.tensor_parallel_size, config.dp_size, config.dp_rank
    if num_dp == 1:
        tp = Group(rank, num_tp, world, symmetric_sums(world, device, is_one_host=is_one_host))
        return Groups(tp, ep=tp) if config.expert_parallel else Groups(tp)
    # All ranks make all groups, in the same order. Each takes memory of a GPU: none for one rank, or twice for all.
    tp, places = Group(), [world] * num_tp
    if num_tp > 1:
        workers = [dist.new_group([d * num_tp + t for t in range(num_tp)]) for d in range(num_dp)]
        places = [dist.new_group([d * num_tp + t for d in range(num_dp)]) for t in range(num_tp)]
        worker = workers[dp_rank]
        tp = Group(rank, num_tp, worker, symmetric_sums(worker, device, is_one_host=is_one_host))
    control = dist.new_group(backend="gloo")
    size, world_rank = num_dp * num_tp, dp_rank * num_tp + rank
    return Groups(
        tp,
        dp=Group(dp_rank, num_dp, places[rank]),
        ep=Group(world_rank, size, world),
        control=Group(world_rank, size, control),
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
