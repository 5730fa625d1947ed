"""A model on two ranks, processes of their own, over gloo."""

from worker.core.batch import BatchOutput, ScheduledBatch
from worker.executor.executor import Executor


class Ranks:
    """An executor in the place of a runner."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def submit(self, batch: ScheduledBatch) -> "Ranks":
        self._executor.submit(batch)
        return self

    def result(self) -> BatchOutput:
        return self._executor.collect(60)
