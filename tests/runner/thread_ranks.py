"""Ranks as threads of this process, with real process groups (gloo) between them: cheap, and no less strict."""

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

WAIT = timedelta(seconds=20)


def run_ranks(size: int, work: Callable[[int, dist.ProcessGroup, Store], T]) -> list[T]:
    """What `work` returns on each rank. It is given its rank, the group of all, and its connection to their store.
    Raises what any of them raised."""
    store = dist.HashStore()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            mine = store.clone()
            results[rank] = work(rank, _gloo(rank, size, dist.PrefixStore("group", mine)), mine)
        except BaseException as error:
            errors.append(error)
            print(f"rank {rank}: {error!r}", file=sys.stderr)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT.total_seconds())
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def _gloo(rank: int, size: int, store: Store) -> dist.ProcessGroup:
    backend = dist.ProcessGroupGloo(store, rank, size, WAIT)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
