"""When a step is done and how long the device took, on a CPU and on a GPU."""

import time
from typing import Protocol

import torch


class Timing(Protocol):
    def start(self) -> None:
        """Mark the beginning of the step's work."""

    def stop(self) -> None:
        """Mark the end of the step's work, copies to the host included."""

    def wait(self) -> float:
        """Block until the device got to the mark; seconds from start to stop, as the device saw it."""


class StepTimer:
    def __init__(self, device: torch.device) -> None:
        self._kind: type[CpuTiming] | type[GpuTiming] = CpuTiming if device.type == "cpu" else GpuTiming

    def start(self) -> Timing:
        timing = self._kind()
        timing.start()
        return timing


class CpuTiming:
    """Work is done when the call returns."""

    def __init__(self) -> None:
        self._start = self._seconds = 0.0

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._start

    def wait(self) -> float:
        return self._seconds


class GpuTiming:
    """Events in the current stream."""

    def __init__(self, *, is_captured: bool = False) -> None:
        """`is_captured`: they are parts of a graph, and each replay marks them anew."""
        self._begin, self._end = (
            torch.cuda.Event(enable_timing=True, blocking=True, external=is_captured) for _ in range(2)
        )

    def start(self) -> None:
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def wait(self) -> float:
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3
