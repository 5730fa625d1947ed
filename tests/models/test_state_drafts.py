"""Models with recurrent state say with drafts, right or wrong, what they say without."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.loop import GREEDY, Loop, make_sequence
from tests.fakes.graphs import RecordedGraphs
from tests.models.cases import VOCABULARY, all_cases, all_families
from tests.models.saved import Saved, save
from tests.runner.conftest import random_prompt
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.drafter import Drafter
from worker.core.model_drafter import ModelDrafter
from worker.core.ngram_drafter import NgramDrafter
from worker.core.params import BeamParams, SamplingParams
from worker.core.sequence import Sequence
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import ModelInfo, RunnerConfig
from worker.runner.graphs import GraphSizes
from worker.runner.model_runner import ModelRunner

CASES = {
    name: make
    for family in all_families().values()
    if "DeltaNet" in family.attention
    for name, make in family.cases.items()
}
NUM_TOKENS = 16
NUM_SEQS, BEAM = 8, 6
SHARED = random_prompt(40, 1, VOCABULARY)
PROMPTS = [
    SHARED,
    [*SHARED[:33], *random_prompt(9, 2, VOCABULARY)],
    [*SHARED[:32], 5],
    random_prompt(1, 3, VOCABULARY),
    [*SHARED, *random_prompt(20, 4, VOCABULARY)],
    SHARED,
]
RULES = [
    GREEDY,
    SamplingParams(seed=1, temperature=0.9, top_p=0.9),
    SamplingParams(seed=2, repetition_penalty=1.3, num_logprobs=2),
    GREEDY,
    SamplingParams(seed=3, top_k=20, min_p=0.05),
    SamplingParams(seed=4, presence_penalty=1.0),
]


class Reciter:
    """Knows what each sequence will say, and is right `share` of the time."""

    def __init__(self, tokens: dict[int, list[int]], share: float) -> None:
        self._tokens, self._share, self._random = tokens, share, random.Random(5)

    def begin_step(self) -> None:
        pass

    def propose(self, seq: Sequence, most: int) -> list[int]:
        at = seq.num_generated_tokens
        drafts = self._tokens[seq.id][at : at + self._random.randint(0, most)]
        return [token if self._random.random() < self._share else (token + 1) % VOCABULARY for token in drafts]


class Model:
    """A case, run with and without drafts."""

    def __init__(self, saved: Saved) -> None:
        self.path = saved.path
        self.plain = self.loop(num_blocks=64)
        self.plain.run(*sequences())

    def loop(self, drafter: Drafter | None = None, num_drafts: int = 0, num_blocks: int = 12, **more) -> Loop:
        """Tight, unless there are more blocks: some are preempted."""
        runner, info = self.runner(num_drafts, num_blocks)
        return self.loop_over(runner, info, drafter, num_drafts, **more)

    def runner(self, num_drafts: int, num_blocks: int = 12, **more) -> tuple[ModelRunner, ModelInfo]:
        config = RunnerConfig(
            model=str(self.path), device="cpu", num_blocks=num_blocks, max_num_seqs=NUM_SEQS, quantization="none",
            num_speculative_tokens=num_drafts, num_state_checkpoints=3, max_num_batched_tokens=96, **more,
        )  # fmt: skip
        return build_runner(config, Group())

    def loop_over(self, runner: ModelRunner, info: ModelInfo, drafter: Drafter | None, num_drafts: int, **more) -> Loop:
        scheduler = SchedulerConfig(
            max_model_len=256, max_num_seqs=NUM_SEQS, max_num_batched_tokens=96, watermark=0.0, async_depth=0,
            num_speculative_tokens=num_drafts, **more,
        )  # fmt: skip
        cache = CacheConfig(
            num_blocks=info.num_blocks, num_groups=info.num_groups, num_checkpoints=info.num_checkpoints
        )
        return Loop(runner, scheduler, cache, drafter)

    def check(self, loop: Loop) -> None:
        assert loop.tokens == self.plain.tokens
        beams, wanted = (each.ended[BEAM].hypotheses for each in (loop, self.plain))
        assert [beam.token_ids for beam in beams] == [beam.token_ids for beam in wanted]
        load = loop.scheduler.load()
        assert load.num_preemptions > 0 and load.num_prefix_hits > 0 and load.num_draft_tokens > 0


def sequences() -> list[Sequence]:
    """And a beam search beside them, which is not drafted."""
    drafted = [make_sequence(i, PROMPTS[i], NUM_TOKENS, RULES[i]) for i in range(len(PROMPTS))]
    return [*drafted, make_sequence(BEAM, SHARED[:20], 5, beam=BeamParams(width=2))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """By the case's name, each made once."""
    return cache(lambda name: Model(save(CASES[name], tmp_path_factory.mktemp(name))))


MIXED = (0.8, 5, {"scheduling_policy": "chunked", "max_prefill_chunk": 7})
"""Share of right drafts, most of a row, how steps are planned."""
ALONE = [(1.0, 4, {}), (0.5, 1, {"scheduling_policy": "chunked"}), (0.0, 3, {"max_prefill_chunk": 3})]


@pytest.mark.parametrize(
    ("case", "way"), [*((name, MIXED) for name in CASES), *(("qwen3-next", way) for way in ALONE)], ids=str
)
def test_tokens_are_those_without_drafts(models: Callable[[str], Model], case: str, way: tuple) -> None:
    """Preempted in between, and with prompts that go on from states of others; chunks may be as short as drafts."""
    model, (share, num_drafts, more) = models(case), way
    loop = model.loop(Reciter(model.plain.tokens, share), num_drafts, **more)
    loop.run(*sequences(), each_step=1)
    model.check(loop)
    load = loop.scheduler.load()
    assert load.num_accepted_tokens > 0 or share == 0.0
    assert load.num_accepted_tokens < load.num_draft_tokens or share == 1.0


def test_drafts_of_repeated_text(models: Callable[[str], Model]) -> None:
    model = models("qwen3-next")
    loop = model.loop(NgramDrafter(1, 3), 4)
    loop.run(*sequences(), each_step=2)
    model.check(loop)


def test_drafts_of_a_model_from_graphs(models: Callable[[str], Model], tmp_path: Path) -> None:
    model, stranger = models("qwen3.5"), save(all_cases()["qwen3"], tmp_path)
    runner, info = model.runner(2, drafter="draft", draft_model=str(stranger.path), kernel_backend="torch")
    with torch.inference_mode():
        runner.capture(GraphSizes(tokens=(8, 32, 96)), graphs := RecordedGraphs())
    loop = model.loop_over(runner, info, ModelDrafter(), 2)
    loop.run(*sequences(), each_step=1)
    model.check(loop)
    assert any(graph.num_replays for graph in graphs.graphs)


@pytest.mark.parametrize(("case", "num_blocks"), [("qwen3-next", 12), ("qwen3.5", 64)])
def test_a_draft_with_state_is_right_where_it_is_the_model(
    models: Callable[[str], Model], case: str, num_blocks: int
) -> None:
    """Its state is right at every place, as not one draft is wrong: whatever was tried, in chunks, behind prefixes,
    after preemption, and beside beams."""
    model = models(case)
    runner, info = model.runner(3, num_blocks, drafter="draft", draft_model=str(model.path))
    loop = model.loop_over(runner, info, ModelDrafter(), 3, scheduling_policy="chunked", max_prefill_chunk=7)
    loop.run(*sequences(), each_step=1)
    assert loop.tokens == model.plain.tokens
    load = loop.scheduler.load()
    assert load.num_accepted_tokens == load.num_draft_tokens > 40
    assert load.num_prefix_hits > 0 and (load.num_preemptions > 0) == (num_blocks == 12)


def test_a_draft_with_state_for_a_model_without(models: Callable[[str], Model], tmp_path: Path) -> None:
    """It is wrong, and changes nothing; replayed from graphs."""
    plain = Model(save(all_cases()["qwen3"], tmp_path))
    draft = str(models("qwen3-next").path)
    runner, info = plain.runner(2, drafter="draft", draft_model=draft, kernel_backend="torch")
    with torch.inference_mode():
        runner.capture(GraphSizes(tokens=(8, 32, 96)), graphs := RecordedGraphs())
    loop = plain.loop_over(runner, info, ModelDrafter(), 2)
    loop.run(*sequences(), each_step=1)
    plain.check(loop)
    assert info.num_groups == NUM_SEQS and any(graph.num_replays for graph in graphs.graphs)


def test_memory_of_what_may_be_taken_back(models: Callable[[str], Model]) -> None:
    """It is in the plan, and a part of the state alone: no copy of it for each draft. A draft model has one copy."""
    path = str(models("qwen3-next").path)
    plain = RunnerConfig(model=path, device="cpu", num_blocks=8)
    drafted = replace(plain, num_speculative_tokens=4)
    configs = (plain, drafted, replace(drafted, drafter="draft", draft_model=path))
    without, with_drafts, with_model = (build_runner(config, Group())[1].memory.state for config in configs)
    assert with_model == 3 * with_drafts
    assert without < with_drafts
