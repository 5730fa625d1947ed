"""How the ranks of an executor find each other: through a store of which rank 0 holds the listening socket."""

import os
import sys
from ipaddress import ip_address

import torch
import torch.distributed as dist

from worker.parallel.group import Group
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
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return Group(rank, size, dist.group.WORLD)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
