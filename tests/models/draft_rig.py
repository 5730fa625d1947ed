"""Models that draft by their own layers, beside a plain computation of the same drafts."""

import random
from pathlib import Path

import torch

from tests.engine.loop import Loop, make_sequence
from tests.engine.ranks import Ranks
from tests.models.cases import VOCABULARY
from tests.models.mtp import Mtp
from tests.runner.conftest import random_prompt
from worker.core.batch import ScheduledBatch
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.model_drafter import ModelDrafter
from worker.core.params import SamplingParams
from worker.executor.executor import Executor
from worker.kernels.step import Round
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import ModelInfo, RunnerConfig
from worker.runner.model_runner import ModelRunner

NUM_TOKENS, NUM_DRAFTS = 14, 3
PROMPTS = [random_prompt(length, length, VOCABULARY) for length in (1, 5, 17, 40)]
Built = tuple[ModelRunner, ModelInfo]
OPTIONS = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 128}


def build(path: Path, **options: object) -> Built:
    return build_runner(runner_config(path, **options), Group())


def runner_config(path: Path, **options: object) -> RunnerConfig:
    defaults = {"num_blocks": 64, "drafter": "mtp", "num_speculative_tokens": NUM_DRAFTS, **OPTIONS}
    return RunnerConfig(model=str(path), device="cpu", num_state_checkpoints=3, **(defaults | options))


def make_loop(built: Built, num_blocks: int = 64, drafter: object = None, **scheduler) -> Loop:
    options = {"async_depth": 0, "num_speculative_tokens": NUM_DRAFTS if drafter else 0, "watermark": 0.0, **OPTIONS}
    runner, info = built
    cache = CacheConfig(num_blocks=num_blocks, num_groups=info.num_groups, num_checkpoints=info.num_checkpoints)
    return Loop(runner, SchedulerConfig(**(options | scheduler)), cache, drafter)


class Watch:
    """Compares what is proposed with the plain computation, then puts in place of it what the model will say, up to
    some token that is wrong: rows go on after any number of drafts that were right."""

    def __init__(self, mtp: Mtp, runner: ModelRunner, texts: list[list[int]]) -> None:
        self._mtp, self._texts, self._random = mtp, texts, random.Random(1)
        self._drafting, self._tokens = runner._parts.drafting, runner._parts.slots.tables.tokens
        self._propose = self._drafting.propose
        self.num_compared = 0

    def propose(self, batch: ScheduledBatch, together: Round | None) -> None:
        self._propose(batch, together)
        for row, num in batch.num_draft_tokens.items():
            length, tokens = batch.num_computed_tokens[row] + 1, self._tokens[batch.slots[row]]
            (text,) = (text for text in self._texts if text[:length] == tokens[:length].tolist())
            assert tokens[length : length + num].tolist() == self._mtp.drafts(text, length, num)
            self.num_compared += num
            tokens[length : length + num] = torch.tensor(text[length : length + num])
            if self._random.random() < 0.5:
                tokens[length + self._random.randrange(num)] += 1


def assert_two_ranks_propose_alike(built: Built, allowed: tuple[int, ...], path: Path, **options: object) -> None:
    """Of few tokens that requests allow, some drafts are right: as many as on one rank."""
    config = runner_config(path, tensor_parallel_size=2, num_threads=1, **options)
    executor = Executor(config, log_level="warning")
    executor.start(120)
    try:
        loops = [make_loop((each, built[1]), drafter=ModelDrafter()) for each in (built[0], Ranks(executor))]
        for loop in loops:
            params = [SamplingParams(seed=i, allowed_token_ids=allowed) for i in range(4)]
            loop.run(*(make_sequence(i, PROMPTS[i], NUM_TOKENS, params[i]) for i in range(4)))
    finally:
        executor.shutdown()
    one, two = (loop.scheduler.load() for loop in loops)
    assert loops[0].tokens == loops[1].tokens
    assert one.accepted_counts == two.accepted_counts and one.num_accepted_tokens > 5
