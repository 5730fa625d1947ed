"""How many blocks the cache gets."""

import logging
import os
from pathlib import Path

from worker.runner.config import RunnerConfig

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_DEFAULT_SHARE, CPU_DEFAULT_MOST = 0.25, 4 * GIB


class CacheMemoryError(Exception):
    """The cache cannot hold one block; the message names the setting that would do."""


def blocks_on_cpu(config: RunnerConfig, bytes_per_block: int, most_useful: int) -> int:
    """`most_useful`: blocks of max_num_seqs sequences at the longest; more are never needed."""
    if config.kv_cache_gib is not None:
        budget = int(config.kv_cache_gib * GIB)
    else:
        budget = min(int(available_host_memory() * CPU_DEFAULT_SHARE), CPU_DEFAULT_MOST)
    num_blocks = min(budget // bytes_per_block, most_useful)
    if num_blocks < 1:
        raise CacheMemoryError(
            f"a KV cache of {budget / GIB:.3f} GiB does not hold one block of {bytes_per_block} bytes; "
            f"the smallest --kv-cache-gib that does is {_ceil(bytes_per_block / GIB, 4)}"
        )
    return num_blocks


def blocks_on_gpu(config: RunnerConfig, bytes_per_block: int, used: int, total: int) -> int:
    """`used`: bytes taken by anyone at the peak of the largest step without a cache; `total`: the device's."""
    if config.kv_cache_gib is not None:
        budget = min(int(config.kv_cache_gib * GIB), total - used)
    else:
        budget = int(total * config.gpu_memory_utilization) - used
    num_blocks = budget // bytes_per_block
    if num_blocks < 1:
        needed = _ceil((used + bytes_per_block) / total, 3)
        raise CacheMemoryError(
            f"weights and activations take {used / GIB:.2f} of {total / GIB:.2f} GiB, so no KV block of "
            f"{bytes_per_block} bytes fits; "
            + (f"the smallest gpu_memory_utilization that does is {needed}" if needed <= 1 else "use a larger device")
        )
    return num_blocks


def available_host_memory() -> int:
    """Bytes that can be allocated without swapping, within the cgroup's limit."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, usage = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and usage.is_file() and (most := limit.read_text().strip()) != "max":
        available = min(available, int(most) - int(usage.read_text()))
    return max(available, 0)


def physical_cores() -> int:
    """Cores, not hyper-threads, that this process may run on; within the cgroup's CPU quota."""
    cores = set()
    allowed = os.sched_getaffinity(0)
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.is_file() else str(cpu))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file() and (fields := quota.read_text().split())[0] != "max":
        return max(1, min(len(cores), int(fields[0]) // int(fields[1])))
    return max(1, len(cores))


def _ceil(value: float, digits: int) -> float:
    scale = 10**digits
    return -int(-value * scale // 1) / scale
