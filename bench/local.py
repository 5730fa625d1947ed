"""Scheduler and model runner in one process, without services: the engine loop of a benchmark."""

import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.outputs import LoadSnapshot
from worker.core.params import SamplingParams, StopConditions
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence
from worker.layers.parallel import TensorParallel
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Run:
    """What came of some sequences."""

    token_ids: list[list[int]]
    seconds: float
    num_steps: int
    device_seconds: float
    """The device's own time in all steps."""
    load: LoadSnapshot

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds

    @property
    def gap_share(self) -> float:
        """Share of the time in which the device ran no step."""
        return max(0.0, 1 - self.device_seconds / self.seconds)


@dataclass(slots=True)
class LocalEngine:
    """A runner, and a fresh scheduler for each `generate`."""

    config: RunnerConfig
    max_model_len: int = 2048
    _built: list = field(default_factory=list)

    def generate(
        self, prompts: Items[list[int]], max_tokens: int, *, async_depth: int, num_blocks: int | None = None,
        preemption_mode: str = "recompute",
    ) -> Run:  # fmt: skip
        """Greedy, EOS ignored. `num_blocks` makes the pool smaller than the cache, to force preemption."""
        if not self._built:
            self._built += build_runner(self.config, TensorParallel())
        runner, info = self._built
        scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=self.max_model_len, max_num_seqs=self.config.max_num_seqs, async_depth=async_depth,
                max_num_batched_tokens=self.config.max_num_batched_tokens, preemption_mode=preemption_mode,
            ),
            CacheConfig(
                num_blocks=num_blocks or info.num_blocks, block_size=info.block_size,
                num_host_blocks=info.num_host_blocks, enable_prefix_caching=False,
            ),
        )  # fmt: skip
        for i, prompt in enumerate(prompts):
            stop = StopConditions(max_tokens=max_tokens)
            scheduler.add(
                Sequence(id=i + 1, token_ids=prompt, num_prompt_tokens=len(prompt), stop=stop, sampling=GREEDY)
            )
        token_ids: list[list[int]] = [[] for _ in prompts]
        pending: deque = deque()
        num_steps, device_seconds = 0, 0.0
        begin = time.perf_counter()
        while scheduler.has_unfinished():
            batch = scheduler.schedule() if len(pending) <= async_depth else None
            if batch is not None:
                pending.append((batch, runner.submit(batch)))
            if pending and (batch is None or len(pending) > async_depth):
                batch, step = pending.popleft()
                output = step.result()
                device_seconds += output.run_seconds
                num_steps += 1
                scheduler.postprocess(batch, output)
            for output in scheduler.take_outputs():
                token_ids[output.sequence_id - 1] += output.token_ids
        seconds = time.perf_counter() - begin
        for batch, step in pending:
            scheduler.postprocess(batch, step.result())
        scheduler.check_integrity()
        load = scheduler.load()
        assert load.num_blocks_free == load.num_blocks, load
        return Run(token_ids, seconds, num_steps, device_seconds, load)
