"""When a step is done and how long the device took, on a CPU and on a GPU."""

import time
from typing import Protocol

import torch


class Timing(Protocol):
    def stop(self) -> None:
        """Mark the end of the step's work, copies to the host included."""

    def wait(self) -> float:
        """Block until the device got to the mark; seconds from start to stop, as the device saw it."""


class StepTimer:
    def __init__(self, device: torch.device) -> None:
        self._kind: type[CpuTiming] | type[GpuTiming] = CpuTiming if device.type == "cpu" else GpuTiming

    def start(self) -> Timing:
        return self._kind()


class CpuTiming:
    """Work is done when the call returns."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._start

    def wait(self) -> float:
        return self._seconds


class GpuTiming:
    """Events in the current stream."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def wait(self) -> float:
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3
