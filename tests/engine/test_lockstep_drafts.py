"""Workers that hold half of a model's experts each draft together: passes of a layer with experts are made by all."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor

from tests.engine.lockstep import MAX_NUM_SEQS, MAX_STEP_TOKENS, Worker, running_workers
from tests.engine.loop import make_sequence
from tests.models.cases import all_cases
from tests.models.draft_rig import PROMPTS, build, make_loop
from tests.models.eagle3 import CASES, Eagle
from tests.models.mtp import FORMS, Mtp
from tests.models.saved import Saved, save
from worker.core.batch import ScheduledBatch
from worker.core.model_drafter import ModelDrafter
from worker.core.params import SamplingParams
from worker.kernels.step import Round
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig
from worker.runner.model_runner import ModelRunner
from worker.runner.pending import PendingStep

MODEL = "deepseek-v3"
STEPS = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_STEP_TOKENS}
FEW = SamplingParams(seed=3, allowed_token_ids=(3, 11, 40))
"""Of so few tokens some drafts are right."""


@dataclass(frozen=True, slots=True)
class Noted(Group):
    """Of two ranks, of which the other adds nothing."""

    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def all_gather(self, x: Tensor) -> Tensor:
        self.calls.append(("gather", tuple(x.shape)))
        return x.repeat(2, *[1] * (x.dim() - 1))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.calls.append(("scatter", tuple(x.shape)))
        return x[: len(x) // 2]


class BesideAnIdleRank:
    """Makes each step, then that of a rank without a batch, which must ask for the same collectives."""

    def __init__(self, runner: ModelRunner, dp: Noted) -> None:
        self._runner, self._calls = runner, dp.calls
        self.num_calls = 0

    def submit(self, batch: ScheduledBatch) -> PendingStep:
        drafts = batch.num_draft_tokens.values()
        # Another rank has more tokens, and more rows with drafts.
        together = Round(batch.num_tokens + 2, False, max(drafts, default=0) + 1, len(drafts) + 1)
        self._calls.clear()
        pending, own = self._runner.submit(batch, together), self._take()
        self._runner.submit(self._runner.idle_batch(together), together).result()
        assert self._take() == own
        self.num_calls += len(own)
        return pending

    def _take(self) -> list[tuple[str, tuple[int, ...]]]:
        calls = list(self._calls)
        self._calls.clear()
        return calls


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    found = save(all_cases()[MODEL], tmp_path_factory.mktemp("spread"))
    Mtp(found, FORMS[MODEL])
    return found


@pytest.fixture(scope="module")
def eagle(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Eagle(CASES["of the model"], saved, tmp_path_factory.mktemp("eagle")).path


@pytest.mark.parametrize("drafter", ["mtp", "eagle3", "draft"])
def test_who_has_no_drafts_makes_the_passes_of_others(saved: Saved, eagle: Path, drafter: str) -> None:
    """As many collectives of the same sizes; and its own tokens are those of a run without them. Drafts of a model
    that is whole in each worker need none."""
    draft_model = {"mtp": None, "eagle3": str(eagle), "draft": str(saved.path)}[drafter]
    dp = Noted(0, 2)
    config = RunnerConfig(
        model=str(saved.path), device="cpu", num_blocks=64, expert_parallel=True, dp_size=2, drafter=drafter,
        draft_model=draft_model, num_speculative_tokens=3, max_model_len=64, **STEPS,
    )  # fmt: skip
    runner, info = build_runner(config, Group(), ep=Group(0, 2), dp=dp)
    beside = BesideAnIdleRank(runner, dp)
    alone, together = (make_loop((each, info), drafter=ModelDrafter(), **STEPS) for each in (runner, beside))
    for loop in (alone, together):
        loop.run(*(make_sequence(i, prompt, 10) for i, prompt in enumerate(PROMPTS)), each_step=1)
    load = together.scheduler.load()
    assert together.tokens == alone.tokens and load.accepted_counts == alone.scheduler.load().accepted_counts
    assert load.num_draft_tokens > 20
    # A gather and a scatter: of the one layer of the model that has experts, and of each pass of another such layer.
    of_model = 2 * load.num_steps
    assert beside.num_calls > 2 * of_model if drafter == "mtp" else beside.num_calls == of_model


@pytest.fixture(scope="module")
def workers(saved: Saved) -> Iterator[list[Worker]]:
    with running_workers(
        saved.path, num_dp=2, num_tp=1, max_model_len=64, drafter="mtp", num_speculative_tokens=3
    ) as running:
        yield running


def test_each_proposes_what_one_worker_does(workers: list[Worker], saved: Saved) -> None:
    """One has less to do than the other and is idle at the end; then it is the only one that has anything."""
    busy, other = workers
    whole = make_loop(build(saved.path, **STEPS), drafter=ModelDrafter(), **STEPS)
    ids = range(len(PROMPTS))
    whole.run(*(make_sequence(i, PROMPTS[i], 14, FEW) for i in ids))
    with ThreadPoolExecutor(1) as pool:
        few = pool.submit(other.generate, PROMPTS[1], max_tokens=6, sampling=FEW)
        assert busy.generate(*PROMPTS, max_tokens=14, sampling=FEW) == [whole.tokens[i] for i in ids]
        assert few.result() == [whole.tokens[1][:6]]
    assert busy.load.accepted_counts == whole.scheduler.load().accepted_counts
    assert busy.load.num_accepted_tokens > 5
    saved.assert_greedy(PROMPTS[2], other.generate(PROMPTS[2], max_tokens=12)[0])
