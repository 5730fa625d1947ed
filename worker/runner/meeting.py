"""How the ranks of an executor find each other: through a store of which rank 0 holds the listening socket."""

import os
import sys
from ipaddress import ip_address

import torch
import torch.distributed as dist

from worker.parallel.group import Group
from worker.parallel.symmetric import symmetric_sums
from worker.runner.messages import Place


def meet(rank: int, size: int, device: torch.device, store_port: int, place: Place) -> Group:
    """The group of all ranks. Waits for all of them."""
    if size == 1:
        return Group()
    if _is_loopback(place.store_host) and sys.platform == "linux":
        # All ranks are here: what they say stays here, whatever the host's name leads to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.store_host, store_port, size, is_master=place.store_fd is not None, wait_for_workers=False,
        master_listen_fd=place.store_fd,
    )  # fmt: skip
    backend = "gloo" if device.type == "cpu" else "nccl"
    # A GPU's communicators are made at once: while a graph is captured, it would be too late.
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
    world = dist.group.WORLD
    assert world is not None
    return Group(rank, size, world, symmetric_sums(world, device, is_one_host=place.num_local_ranks == size))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
