"""Scheduler and model runner in this process: the engine loop, for tests of what they do together."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from worker.core.batch import BatchOutput, ScheduledBatch, TokenLogprobs
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.drafter import Drafter
from worker.core.outputs import SequenceOutput
from worker.core.params import SamplingParams, StopConditions
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence
from worker.engine.steps import Steps
from worker.runner.model_runner import ModelRunner
from worker.runner.pending import PendingStep

GREEDY = SamplingParams(temperature=0.0)


def make_sequence(id: int, prompt: list[int], max_tokens: int, sampling: SamplingParams = GREEDY, **more) -> Sequence:
    stop = more.pop("stop", None) or StopConditions(max_tokens=max_tokens)
    return Sequence(id=id, token_ids=prompt, num_prompt_tokens=len(prompt), stop=stop, sampling=sampling, **more)


@dataclass
class InProcess:
    """A runner of this process as an executor."""

    runner: ModelRunner
    pending: deque[PendingStep] = field(default_factory=deque)
    num_scheduled_tokens: int = 0
    num_copied_blocks: int = 0

    def submit(self, batch: ScheduledBatch) -> None:
        self.num_scheduled_tokens += batch.num_tokens
        self.num_copied_blocks += len(batch.blocks_to_copy)
        with torch.inference_mode():
            self.pending.append(self.runner.submit(batch))

    def collect(self, timeout: float) -> BatchOutput:
        return self.pending.popleft().result()


@dataclass
class Loop:
    """Runs sequences to their ends; checks integrity after each step and that nothing is left over.

    Counters are those of all runs; `tokens` and `ended` may be emptied in between.
    """

    runner: ModelRunner
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    drafter: Drafter | None = None
    scheduler: Scheduler = field(init=False)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, SequenceOutput] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Of the tokens of those that ask for them, as `prompt_logprobs`."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.scheduler_config, self.cache_config, drafter=self.drafter)
        self.executor = InProcess(self.runner)
        depth = self.scheduler_config.async_depth
        self.steps = Steps(self.scheduler, self.executor, async_depth=depth, step_timeout=0)

    @property
    def num_scheduled_tokens(self) -> int:
        return self.executor.num_scheduled_tokens

    @property
    def num_copied_blocks(self) -> int:
        return self.executor.num_copied_blocks

    def run(
        self, *arriving: Sequence | list[Sequence], each_step: int = 0, before_step: Callable[[], None] = lambda: None
    ) -> dict[int, list[int]]:
        """Generated tokens by id, those of another worker included. A list is a group. With `each_step`, so many arrive
        before each step, in place of all at once.

        `before_step` may change anything, as what comes between two steps may.
        """
        queue = deque(arriving)
        while queue or self.steps.num_in_flight or self.scheduler.has_unfinished():
            for _ in range(min(each_step or len(queue), len(queue))):
                self._add(queue.popleft())
            before_step()
            self.steps.fill()
            if self.steps.num_in_flight:
                self.steps.finish()
            self._take()
            self.scheduler.check_integrity()
        load = self.scheduler.load()
        assert (load.num_free_blocks, load.num_used_host_blocks) == (load.num_blocks, 0)
        return self.tokens

    def _add(self, arrived: Sequence | list[Sequence]) -> None:
        if isinstance(arrived, list):
            self.tokens |= {member.id: list(member.token_ids[member.num_prompt_tokens :]) for member in arrived}
            self.scheduler.add_group(arrived)
        else:
            self.tokens[arrived.id] = list(arrived.token_ids[arrived.num_prompt_tokens :])
            self.scheduler.add(arrived)

    def _take(self) -> None:
        for output in self.scheduler.take_outputs():
            got = self.tokens[output.sequence_id]
            assert output.sequence_id not in self.ended, "nothing comes after the end"
            if output.hypotheses is None:
                assert output.token_offset == len(got), "no gap, no repeat"
                got += output.token_ids
            if output.logprobs is not None:
                assert len(output.logprobs) == len(output.token_ids)
                self.logprobs.setdefault(output.sequence_id, []).extend(output.logprobs)
            if output.prompt_logprobs is not None:
                so_far = self.prompt_logprobs.setdefault(output.sequence_id, [])
                assert output.prompt_logprobs_offset == len(so_far), "each comes once"
                so_far += output.prompt_logprobs
            if output.finish_reason is not None:
                self.ended[output.sequence_id] = output
