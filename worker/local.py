"""The engine without services: prompts in, tokens out. For programs of one process, benchmarks and tests.

with LocalEngine(RunnerConfig(model="smollm2")) as engine:
    run = engine.generate([[504, 2365, 9158]], max_tokens=16)
    print(run.token_ids[0])
"""

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Self

from worker.core.config import CacheConfig, PreemptionMode, SchedulerConfig
from worker.core.drafter import Drafter
from worker.core.outputs import LoadSnapshot
from worker.core.params import SamplingParams, StopConditions
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence
from worker.core.tokens import token_array
from worker.engine.steps import FinishedStep, Steps, run_to_end
from worker.executor.executor import Executor
from worker.runner.config import ModelInfo, RunnerConfig

GREEDY = SamplingParams(temperature=0.0)
STEP_SECONDS = 120.0


@dataclass(slots=True)
class Run:
    """What came of some sequences."""

    token_ids: list[list[int]]
    """New tokens of each prompt, in the order of the prompts."""
    load: LoadSnapshot
    """At the end."""
    seconds: float = 0.0
    steps: list[FinishedStep] = field(default_factory=list)
    decode_step_seconds: list[float] = field(default_factory=list)
    """Of steps with one token for each sequence."""

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds

    @property
    def gap_share(self) -> float:
        """Share of the time in which the device ran no step."""
        return max(0.0, 1 - sum(step.run_seconds for step in self.steps) / self.seconds)


class LocalEngine:
    """Processes with the model that last, and a fresh scheduler for each `generate`. A context manager: its end stops
    the processes. One thread at a time."""

    def __init__(self, config: RunnerConfig, *, log_level: str = "warning") -> None:
        """Waits until the model is loaded. Raises ExecutorError. `log_level`: of the model's processes."""
        self._config = config
        self._executor = Executor(config, log_level=log_level)
        self.model: ModelInfo = self._executor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._executor.shutdown()

    def generate(
        self,
        prompts: Items[Items[int]],
        max_tokens: int,
        *,
        sampling: Items[SamplingParams] | None = None,
        stop: StopConditions | None = None,
        async_depth: int = 1,
        num_blocks: int | None = None,
        preemption_mode: PreemptionMode = "recompute",
        drafter: Drafter | None = None,
    ) -> Run:
        """All prompts, token ids, to their ends; by default greedy, and without an ending but `max_tokens`.

        `sampling` has one entry a prompt; `stop` is for all of them, in place of `max_tokens`. `num_blocks` makes the
        pool smaller than the cache. `drafter` may draft as many tokens of a sequence as the engine's config says
        (`num_speculative_tokens`); `async_depth` does not count then. Raises InvalidSequenceError for a prompt that
        cannot run, ExecutorError if the model's processes fail.
        """
        async_depth = 0 if drafter is not None else async_depth
        scheduler = self._scheduler(async_depth, num_blocks, preemption_mode, drafter)
        stop = stop or StopConditions(max_tokens=max_tokens)
        for i, (prompt, params) in enumerate(zip(prompts, sampling or [GREEDY] * len(prompts), strict=True)):
            tokens = token_array(prompt)
            scheduler.add(Sequence(id=i, token_ids=tokens, num_prompt_tokens=len(tokens), stop=stop, sampling=params))
        run = Run([[] for _ in prompts], scheduler.load())
        begin = time.perf_counter()
        steps = Steps(scheduler, self._executor, async_depth=async_depth, step_timeout=STEP_SECONDS)
        for finished, outputs in run_to_end(scheduler, steps):
            run.steps.append(finished)
            if finished.batch.num_scheduled_tokens == [1] * len(prompts):
                run.decode_step_seconds.append(finished.step_seconds)
            for output in outputs:
                run.token_ids[output.sequence_id] += output.token_ids
        run.seconds, run.load = time.perf_counter() - begin, scheduler.load()
        scheduler.check_integrity()
        return run

    def _scheduler(
        self, async_depth: int, num_blocks: int | None, preemption_mode: PreemptionMode, drafter: Drafter | None
    ) -> Scheduler:
        model, config = self.model, self._config
        return Scheduler(
            SchedulerConfig(
                max_model_len=model.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                async_depth=async_depth,
                preemption_mode=preemption_mode,
                num_speculative_tokens=config.num_speculative_tokens if drafter is not None else 0,
            ),
            CacheConfig(
                num_blocks=num_blocks or model.num_blocks,
                block_size=model.block_size,
                num_host_blocks=model.num_host_blocks,
                num_groups=model.num_groups,
                enable_prefix_caching=False,
            ),
            drafter=drafter,
        )
