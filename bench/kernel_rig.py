"""What benchmarks of single operations share: shapes of a model, tensors, time by CUDA graph, figures."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.bandwidth import copy_bandwidth
from bench.common import Figure
from worker.kernels.select import Kernels

BLOCK_SIZE = 16
L2_BYTES = 200e6
"""More than any card's L2 cache holds."""


@dataclass(frozen=True)
class Shapes:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Name → (output, input features)."""
        width = self.heads * self.head_dim
        return {
            "qkv": (width + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, width),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


QWEN3_8B = Shapes(4096, 12288, 32, 8, 128, 151936)
TINY = Shapes(64, 96, 4, 2, 16, 128)


class Bench:
    """Kernels of one device, tensors for them, and what was measured."""

    def __init__(self, shapes: Shapes, device: torch.device, dtype: torch.dtype) -> None:
        self.shapes, self.device, self.dtype = shapes, device, dtype
        self.kernels = Kernels(device)
        self.figures: dict[str, Figure] = {}
        self.bandwidth = 0.0
        """Bytes a second, of a copy."""

    def measure_copy(self) -> None:
        self.bandwidth = copy_bandwidth(self.device)
        self.keep("copy_gb_s", self.bandwidth / 1e9, 0)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) * 0.02

    def integers(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=dtype)

    def time_us(self, calls: Sequence[Callable[[], object]], replays: int = 20) -> float:
        """Microseconds of one call, of a graph of all of them."""
        for call in calls[:2]:
            call()
        if self.device.type == "cpu":
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) / len(calls) * 1e6
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / replays / len(calls) * 1e3

    def keep(self, name: str, value: float, digits: int = 2) -> None:
        self.figures[name] = round(value, digits)
        print(f"{name} {self.figures[name]}", flush=True)

    def copies(self, num_bytes: float, most: int = 256) -> int:
        """How many of such tensors the L2 cache cannot hold."""
        return max(2, min(most, int(L2_BYTES / num_bytes) + 1)) if self.device.type == "cuda" else 2
