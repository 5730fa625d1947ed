"""A worker whose scheduler, cache and services are real, and whose device takes time for each token and computes none.

    python -m bench.simulated_worker --port-file FILE --num-blocks N [--step-time SECONDS] [--token-time SECONDS]

What is cached need not be computed, so a hit saves the time that it would save on a device of that speed.
"""

import argparse
import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

from common.ports import write_port_file
from common.signals import stop_event_on_signals
from tests.fakes import tokenizer as toys
from tests.worker.fake_executor import FakeExecutor
from worker.config import WorkerSettings
from worker.core.batch import BatchOutput, ScheduledBatch
from worker.face.served_files import ServedFiles
from worker.loader.tokenizer import TokenizerFiles
from worker.server import WorkerServer

MODEL = "simulated"
MAX_MODEL_LEN = 2048
MAX_BATCHED_TOKENS = 2048


class TimedExecutor(FakeExecutor):
    """Steps run one after the other, each as long as its tokens take."""

    def __init__(self, on_rank_end: Callable[[], None], num_blocks: int, step_time: float, token_time: float) -> None:
        super().__init__(on_rank_end, num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN)
        self._step_time = step_time
        self._token_time = token_time
        self._num_tokens: deque[int] = deque()
        """Of the steps that were not collected yet."""

    def submit(self, batch: ScheduledBatch) -> None:
        super().submit(batch)
        self._num_tokens.append(batch.num_tokens)

    def collect(self, timeout: float) -> BatchOutput:
        self.step_seconds = self._step_time + self._token_time * self._num_tokens.popleft()
        return super().collect(timeout)


async def serve(arguments: argparse.Namespace) -> None:
    """Until a signal comes."""
    stop = stop_event_on_signals()
    settings = WorkerSettings(
        host="127.0.0.1", port=0, served_model_name=(MODEL,), max_num_batched_tokens=MAX_BATCHED_TOKENS
    )
    files = ServedFiles(TokenizerFiles(toys.files(toys.byte_level())), model_fingerprint=MODEL)

    def executor(on_rank_end: Callable[[], None]) -> TimedExecutor:
        return TimedExecutor(on_rank_end, arguments.num_blocks, arguments.step_time, arguments.token_time)

    worker = WorkerServer(settings, executor, lambda: files)
    try:
        await worker.listen()
        await worker.load()
        write_port_file(arguments.port_file, worker.port)
        await stop.wait()
    finally:
        await worker.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--step-time", type=float, default=0.003)
    parser.add_argument("--token-time", type=float, default=0.0001)
    asyncio.run(serve(parser.parse_args()))
