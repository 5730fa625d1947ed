"""Executors of a tiny model, and their processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.runner.driver import Driver
from worker.core.batch import BatchOutput, ScheduledBatch
from worker.executor.executor import Executor
from worker.executor.local import LocalRank
from worker.runner.config import RunnerConfig

WAIT = 60.0


class Synchronous:
    """An executor as the driver wants it."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def execute(self, batch: ScheduledBatch) -> BatchOutput:
        self.executor.submit(batch)
        return self.executor.collect(WAIT)


def tiny_config(path: Path | str, **options: object) -> RunnerConfig:
    defaults = {"model": str(path), "device": "cpu", "num_blocks": 64, "max_num_seqs": 16, "num_threads": 1}
    return RunnerConfig(**(defaults | options))  # type: ignore[arg-type]


def driver_of(executor: Executor) -> Driver:
    return Driver(Synchronous(executor), 64, 16)  # type: ignore[arg-type]


@contextmanager
def running(config: RunnerConfig) -> Iterator[Executor]:
    executor = Executor(config)
    executor.start(WAIT)
    try:
        yield executor
    finally:
        executor.shutdown()


def rank_pid(executor: Executor, rank: int = 0) -> int:
    transport = executor._ranks[rank]._transport
    assert isinstance(transport, LocalRank) and transport.pid is not None
    return transport.pid


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
