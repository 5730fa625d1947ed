"""How many blocks the cache gets."""

import ctypes
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from worker.core.cache.pools import PoolBudgetError, PoolPlan, PoolSpec, plan_pools
from worker.runner.config import RunnerConfig

logger = logging.getLogger(__name__)

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")
_M_ARENA_MAX = -8  # of malloc.h
CPU_DEFAULT_SHARE, CPU_DEFAULT_MOST = 0.25, 4 * GIB


class CacheMemoryError(Exception):
    """The cache cannot hold one block; the message names the setting that would do."""


def plan_on_cpu(config: RunnerConfig, specs: Sequence[PoolSpec], most_useful: int) -> PoolPlan:
    """`most_useful`: blocks of max_num_seqs sequences at the longest; more are never needed."""
    if config.kv_cache_gib is not None:
        budget = int(config.kv_cache_gib * GIB)
    else:
        budget = min(int(available_host_memory() * CPU_DEFAULT_SHARE), CPU_DEFAULT_MOST)
    try:
        return plan_pools(specs, budget, config.max_num_seqs, most_useful, num_checkpoints=config.num_state_checkpoints)
    except PoolBudgetError as error:
        raise CacheMemoryError(
            f"a KV cache of {budget / GIB:.3f} GiB does not hold one block, for which {error.num_bytes_needed} bytes "
            f"are needed; the smallest --kv-cache-gib that does is {_ceil(error.num_bytes_needed / GIB, 4)}"
        ) from None


def plan_on_gpu(config: RunnerConfig, specs: Sequence[PoolSpec], used: int, total: int) -> PoolPlan:
    """`used`: bytes taken by anyone at the peak of the largest step without a cache; `total`: the device's."""
    if config.kv_cache_gib is not None:
        budget = min(int(config.kv_cache_gib * GIB), total - used)
    else:
        budget = int(total * config.gpu_memory_utilization) - used
    try:
        return plan_pools(specs, max(budget, 0), config.max_num_seqs, num_checkpoints=config.num_state_checkpoints)
    except PoolBudgetError as error:
        needed = _ceil((used + error.num_bytes_needed) / total, 3)
        raise CacheMemoryError(
            f"weights and activations take {used / GIB:.2f} of {total / GIB:.2f} GiB, so no KV block fits, for which "
            f"{error.num_bytes_needed} bytes are needed; "
            + (f"the smallest gpu_memory_utilization that does is {needed}" if needed <= 1 else "use a larger device")
        ) from None


def share_one_heap() -> None:
    """Among the threads to come. Each would have a heap of its own, whose upper end the C library never gives back: of
    threads that read weights that is as much as the weights."""
    with suppress(AttributeError):  # a C library that is not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back_free_memory() -> None:
    """What the C library keeps of memory that was freed, such as that of weights before they were packed."""
    with suppress(AttributeError):  # a C library that is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def available_host_memory() -> int:
    """Bytes that can be allocated without swapping, within the cgroup's limit."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, usage, stat = (CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.is_file() and usage.is_file() and stat.is_file() and (most := limit.read_text().strip()) != "max":
        parts = dict(line.split() for line in stat.read_text().splitlines())
        # Pages of files that were read count as used, and are given up for whoever needs memory.
        cached = int(parts["active_file"]) + int(parts["inactive_file"])
        available = min(available, int(most) - int(usage.read_text()) + cached)
    return max(available, 0)


def physical_cores() -> int:
    """Cores, not hyper-threads, that this process may run on; within the cgroup's CPU quota."""
    cores = set()
    allowed = os.sched_getaffinity(0)
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.is_file() else str(cpu))
    quota = CGROUP / "cpu.max"
    if quota.is_file() and (fields := quota.read_text().split())[0] != "max":
        return max(1, min(len(cores), int(fields[0]) // int(fields[1])))
    return max(1, len(cores))


def _ceil(value: float, digits: int) -> float:
    scale = 10**digits
    return -int(-value * scale // 1) / scale
