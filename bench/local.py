"""Scheduler and executor without services: the engine loop of a benchmark."""

import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Self

from worker.core.batch import ScheduledBatch
from worker.core.config import CacheConfig, PreemptionMode, SchedulerConfig
from worker.core.outputs import LoadSnapshot
from worker.core.params import SamplingParams, StopConditions
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence
from worker.executor import Executor
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
    decode_step_seconds: list[float]
    """From one result to the next, of steps with one token for each sequence."""

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds

    @property
    def gap_share(self) -> float:
        """Share of the time in which the device ran no step."""
        return max(0.0, 1 - self.device_seconds / self.seconds)


COLLECT_SECONDS = 120.0


class LocalEngine:
    """An executor that lasts, and a fresh scheduler for each `generate`. A context manager: the end stops the ranks."""

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        self._executor = Executor(config, log_level="warning")
        self._info = self._executor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._executor.shutdown()

    def generate(
        self,
        prompts: Items[list[int]],
        max_tokens: int,
        *,
        async_depth: int,
        num_blocks: int | None = None,
        preemption_mode: PreemptionMode = "recompute",
        sampling: Items[SamplingParams] | None = None,
        stop: StopConditions | None = None,
    ) -> Run:
        """By default greedy, without end. `num_blocks` makes the pool smaller than the cache, to force preemption;
        `sampling` has one entry a prompt."""
        scheduler = self._scheduler(async_depth, num_blocks, preemption_mode)
        stop = stop or StopConditions(max_tokens=max_tokens)
        for i, (prompt, params) in enumerate(zip(prompts, sampling or [GREEDY] * len(prompts), strict=True)):
            scheduler.add(Sequence(id=i, token_ids=prompt, num_prompt_tokens=len(prompt), stop=stop, sampling=params))
        token_ids: list[list[int]] = [[] for _ in prompts]
        in_flight: deque[ScheduledBatch] = deque()
        num_steps, device_seconds = 0, 0.0
        decode_step_seconds: list[float] = []
        begin = last = time.perf_counter()
        while scheduler.has_unfinished() or in_flight:
            batch = scheduler.schedule()
            if batch is not None:
                self._executor.submit(batch)
                in_flight.append(batch)
            if in_flight and (batch is None or len(in_flight) > async_depth):
                result = self._executor.collect(COLLECT_SECONDS)
                device_seconds += result.run_seconds
                num_steps += 1
                done = in_flight.popleft()
                scheduler.postprocess(done, result)
                now = time.perf_counter()
                if done.num_scheduled_tokens == [1] * len(prompts):
                    decode_step_seconds.append(now - last)
                last = now
            for output in scheduler.take_outputs():
                token_ids[output.sequence_id] += output.token_ids
        seconds = time.perf_counter() - begin
        scheduler.check_integrity()
        load = scheduler.load()
        assert load.num_blocks_free == load.num_blocks, load
        return Run(token_ids, seconds, num_steps, device_seconds, load, decode_step_seconds)

    def _scheduler(self, async_depth: int, num_blocks: int | None, preemption_mode: PreemptionMode) -> Scheduler:
        info, config = self._info, self._config
        return Scheduler(
            SchedulerConfig(
                max_model_len=info.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                async_depth=async_depth,
                preemption_mode=preemption_mode,
            ),
            CacheConfig(
                num_blocks=num_blocks or info.num_blocks,
                block_size=info.block_size,
                num_host_blocks=info.num_host_blocks,
                enable_prefix_caching=False,
            ),
        )
