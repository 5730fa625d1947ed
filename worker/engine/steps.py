"""The loop of all who run a model: schedule → submit → collect → postprocess. Knows neither threads nor tensors."""

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from worker.core.batch import BatchOutput, ScheduledBatch
from worker.core.outputs import SequenceOutput
from worker.core.scheduler import Scheduler


class StepExecutor(Protocol):
    """Runs steps in the order of `submit`."""

    def submit(self, batch: ScheduledBatch) -> None:
        """Start a step without waiting. Raises if the device's processes died."""

    def collect(self, timeout: float) -> BatchOutput:
        """Result of the oldest step not collected. Raises if its processes died or it took longer than `timeout`."""


class FinishedStep(NamedTuple):
    """One step on the device, taken in by the scheduler."""

    batch: ScheduledBatch
    step_seconds: float
    """From when it was submitted, or the step before it was done, to its result."""
    run_seconds: float
    """The device's own time."""
    ended_at: float
    """When its result was there, on the monotonic clock."""

    @property
    def gap_seconds(self) -> float:
        """The part of `step_seconds` in which the device did not run it."""
        return max(self.step_seconds - self.run_seconds, 0.0)


class _InFlight(NamedTuple):
    batch: ScheduledBatch
    submitted_at: float


class Steps:
    """One thread's. With `async_depth` 1, step N + 1 is scheduled and submitted while the device runs N."""

    def __init__(self, scheduler: Scheduler, executor: StepExecutor, *, async_depth: int, step_timeout: float) -> None:
        """`async_depth` is the scheduler's own; `step_timeout` in seconds."""
        self._scheduler, self._executor = scheduler, executor
        self._async_depth, self._step_timeout = async_depth, step_timeout
        self._in_flight: deque[_InFlight] = deque()
        self._last_collect = 0.0
        self.is_waiting = False
        """For the executor, which looks after itself."""

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def fill(self) -> None:
        """Keep the device supplied: one step running and, with asynchronous scheduling, one behind it."""
        while len(self._in_flight) <= self._async_depth and self.submit() is not None:
            pass

    def submit(self) -> ScheduledBatch | None:
        """The next step, on its way to the device; None if there is nothing to run now."""
        batch = self._scheduler.schedule()
        if batch is not None:
            self._executor.submit(batch)
            self._in_flight.append(_InFlight(batch, time.monotonic()))
        return batch

    def finish(self) -> FinishedStep:
        """Wait for the oldest step in flight; what came of it is the scheduler's to tell."""
        entry = self._in_flight.popleft()
        self.is_waiting = True
        output = self._executor.collect(self._step_timeout)
        self.is_waiting = False
        now = time.monotonic()
        self._scheduler.postprocess(entry.batch, output)
        seconds = now - max(entry.submitted_at, self._last_collect)
        self._last_collect = now
        return FinishedStep(entry.batch, seconds, output.run_seconds, now)


def run_to_end(scheduler: Scheduler, steps: Steps) -> Iterator[tuple[FinishedStep, list[SequenceOutput]]]:
    """Each step, and what came of it, until nothing is left to do."""
    while scheduler.has_unfinished() or steps.num_in_flight:
        steps.fill()
        yield steps.finish(), scheduler.take_outputs()
