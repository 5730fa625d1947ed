"""Workers whose ranks step together, as real processes: an executor and a loop for each, in this process."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.engine.loop import GREEDY, make_sequence
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.model_drafter import ModelDrafter
from worker.core.outputs import LoadSnapshot
from worker.core.params import SamplingParams
from worker.core.scheduler import Scheduler
from worker.engine.steps import Steps, run_to_end
from worker.executor.errors import ExecutorDiedError
from worker.executor.executor import Executor
from worker.executor.peers import PeerSettings
from worker.runner.config import RunnerConfig

HOST = "127.0.0.1"
WAIT = 120.0
MAX_NUM_SEQS = 4
MAX_STEP_TOKENS = 64


class Worker:
    """`start`, then any number of `generate`."""

    def __init__(self, config: RunnerConfig, peers: PeerSettings) -> None:
        self._has_news = threading.Event()
        self.executor = Executor(config, peers=peers, log_level="warning", on_rank_end=self._has_news.set)
        self.num_steps = 0
        self.load: LoadSnapshot | None = None
        """At the end of the last `generate`."""
        self._num_drafts = config.num_speculative_tokens

    def start(self) -> None:
        self._model = self.executor.start(WAIT)

    @property
    def rank_pids(self) -> list[int]:
        return [rank._transport.pid for rank in self.executor._ranks]  # type: ignore[attr-defined]

    def generate(self, *prompts: list[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> list[list[int]]:
        """Tokens of each. Raises ExecutorError."""
        model, depth = self._model, 0 if self._num_drafts else 1
        scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=model.max_model_len, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_STEP_TOKENS,
                async_depth=depth, num_speculative_tokens=self._num_drafts,
            ),
            CacheConfig(num_blocks=model.num_blocks, block_size=model.block_size, enable_prefix_caching=False),
            drafter=ModelDrafter() if self._num_drafts else None,
        )  # fmt: skip
        for number, prompt in enumerate(prompts):
            scheduler.add(make_sequence(number, prompt, max_tokens, sampling))
        tokens: list[list[int]] = [[] for _ in prompts]
        for _, outputs in run_to_end(scheduler, Steps(scheduler, self.executor, async_depth=depth, step_timeout=WAIT)):
            self.num_steps += 1
            for output in outputs:
                tokens[output.sequence_id] += output.token_ids
        self.load = scheduler.load()
        return tokens

    def wait_for_end(self) -> None:
        """As an engine without work does: looks after the executor when that calls. Raises ExecutorError."""
        deadline = time.monotonic() + WAIT
        while self._has_news.wait(deadline - time.monotonic()):
            self._has_news.clear()
            self.executor.check()
        raise TimeoutError("nothing has ended")


def end_of(work: Callable[[], object]) -> str:
    """How `work` fails."""
    try:
        work()
    except ExecutorDiedError as error:
        return str(error)
    raise AssertionError("it does not fail")


@contextmanager
def running_workers(model: Path, num_dp: int, num_tp: int, **options: object) -> Iterator[list[Worker]]:
    """`options`: of each one's `RunnerConfig`."""
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    peers = PeerSettings(host=HOST, port=port, secret=b"the secret of ranks", stop_seconds=WAIT)
    configs = [replace(_config(model, num_dp, num_tp, dp_rank), **options) for dp_rank in range(num_dp)]
    workers = [Worker(config, peers) for config in configs]
    with ThreadPoolExecutor(num_dp) as pool:
        try:
            list(pool.map(Worker.start, workers))
            yield workers
        finally:
            list(pool.map(lambda worker: worker.executor.shutdown(), workers))


def _config(model: Path, num_dp: int, num_tp: int, dp_rank: int) -> RunnerConfig:
    return RunnerConfig(
        model=str(model), device="cpu", num_threads=1, num_blocks=64, max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_STEP_TOKENS, tensor_parallel_size=num_tp, expert_parallel=True,
        dp_size=num_dp, dp_rank=dp_rank,
    )  # fmt: skip
