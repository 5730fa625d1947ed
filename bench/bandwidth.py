"""What a device's memory can do."""

import time

import torch

GIB = 1 << 30
CPU_BYTES = 1 << 20
"""To see that it works."""


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of the fastest of some large copies.

    By the kernel that copies outside of graphs: inside of one it is the copy engines' work, which are slower (2.7 TB/s
    of an H200's 4.3).
    """
    size = 2 * GIB if device.type == "cuda" else CPU_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / min(_copy_seconds(source, target) for _ in range(6))


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    if source.device.type == "cpu":
        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
