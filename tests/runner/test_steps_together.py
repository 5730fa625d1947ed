"""Workers that share experts: all ranks ask for the same collectives, whatever each has to do, and have GPUs apart."""

import sys
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from tests.engine.loop import Loop, make_sequence
from tests.fakes.graphs import RecordedGraphs
from tests.models.cases.qwen3_moe import CASES
from tests.models.saved import Saved, save
from tests.runner.thread_ranks import run_ranks
from worker.core.batch import ScheduledBatch
from worker.core.cache.pools import PoolKind, PoolSpec
from worker.core.config import CacheConfig, SchedulerConfig
from worker.kernels.operation import CacheKernel
from worker.kernels.step import Round
from worker.layers.attention import GqaAttention
from worker.layers.experts import RoutedExperts
from worker.parallel.group import Group
from worker.runner import assembly
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig
from worker.runner.graphs import GraphSizes
from worker.runner.meeting import refuse_shared_gpus
from worker.runner.model_runner import ModelRunner
from worker.runner.pending import PendingStep
from worker.runner.probe import PeakMemory

MAX_NUM_SEQS, MAX_STEP_TOKENS, MAX_LEN = 4, 64, 128
NUM_LAYERS = 3
SIZES = GraphSizes(rows=(1, 2, 4), tokens=(8, 16))


def test_ranks_with_the_same_gpu_are_refused_by_all() -> None:
    def refusal(gpus: tuple[str, ...]) -> list[str]:
        def work(rank: int, _: dist.ProcessGroup, store: Store) -> str:
            try:
                refuse_shared_gpus(store, rank, len(gpus), gpus[rank])
            except ValueError as error:
                return str(error)
            return ""

        return run_ranks(len(gpus), work)

    assert refusal(("a", "b", "c")) == [""] * 3
    found = refusal(("a", "b", "b"))
    assert len(set(found)) == 1 and found[0].startswith(
        "ranks 1 and 2 of all 3 have the same GPU: each worker on a host"
    )


@pytest.mark.parametrize(("dp_size", "is_made"), [(1, False), (2, True)])
def test_on_a_gpu_all_make_the_largest_step(dp_size: int, is_made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has been told the size of its cache: others may not have been, and cannot make that step alone."""
    steps: list[ScheduledBatch] = []

    def noted(_runner: object, largest: ScheduledBatch, *_: object) -> PeakMemory:
        steps.append(largest)
        return PeakMemory(used=0, total=0, activations=5, graphs=7)

    monkeypatch.setattr(assembly, "measure_peak", noted)
    told = SimpleNamespace(
        config=RunnerConfig(num_blocks=9, max_num_seqs=2, max_num_batched_tokens=8, dp_size=dp_size), tp=Group(),
        kernels=SimpleNamespace(device=torch.device("cuda")), specs=[PoolSpec(PoolKind.PAGE, 1000)], max_model_len=64,
        graph_sizes=None, runner=lambda _plan: None,
    )  # fmt: skip
    sized = assembly.size_cache(told)  # type: ignore[arg-type]
    assert sized.plan.num_blocks == 9
    found = sum(step.num_tokens for step in steps), sized.activations, sized.graphs
    assert found == ((8, 5, 7) if is_made else (0, 0, 0))


CALLS: list[tuple[str, tuple[int, ...]]] = []


@torch.library.custom_op("tests_steps_together::gather", mutates_args=())
def gather(x: Tensor) -> Tensor:
    CALLS.append(("gather", tuple(x.shape)))
    return x.repeat(2, 1)


@torch.library.custom_op("tests_steps_together::scatter", mutates_args=())
def scatter(x: Tensor) -> Tensor:
    CALLS.append(("scatter", tuple(x.shape)))
    return x[: len(x) // 2].clone()


LAYERS: list[RoutedExperts] = []
forward = RoutedExperts.forward


@torch.library.custom_op("tests_steps_together::experts", mutates_args=())
def experts(x: Tensor, weights: Tensor, ids: Tensor, number: int) -> Tensor:
    return forward(LAYERS[number], x, weights, ids, None)


@pytest.fixture
def whole_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one operation, whose shapes do not depend on numbers, as those of a GPU."""

    def as_one(layer: RoutedExperts, x: Tensor, weights: Tensor, ids: Tensor, _: None) -> Tensor:
        if layer not in LAYERS:
            LAYERS.append(layer)
        return experts(x, weights, ids, LAYERS.index(layer))

    monkeypatch.setattr(RoutedExperts, "forward", as_one)
    monkeypatch.setattr(sys.modules[__name__], "LAYERS", [])


@dataclass(frozen=True, slots=True)
class Noted(Group):
    """Of two ranks with the same tokens, of which this one has all experts. Collectives are operations, which a graph
    records, and which note themselves when it is replayed, too."""

    def all_gather(self, x: Tensor) -> Tensor:
        return gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return scatter(x)


class BesideAnIdleRank:
    """Makes each step, then that of a rank without a batch, which must ask for the same collectives."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._others = cycle(((0, True), (1, True), (2, False), (9, True), (30, False)))
        self.num_exchanged: set[int] = set()

    def submit(self, batch: ScheduledBatch) -> PendingStep:
        # Another rank has as many tokens, or some more, in rows of one token or not.
        num_more, is_uniform = next(self._others)
        is_uniform &= all(num == 1 for num in batch.num_scheduled_tokens) and all(batch.samples)
        most = batch.num_tokens + num_more
        together = Round(min(most, MAX_NUM_SEQS) if is_uniform else most, is_uniform)
        pending, own = self._runner.submit(batch, together), take_calls()
        self._runner.submit(self._runner.idle_batch(together), together).result()
        assert take_calls() == own and len(own) == 2 * NUM_LAYERS
        self.num_exchanged |= {shape[0] for name, shape in own if name == "gather"}
        return pending


def take_calls() -> list[tuple[str, tuple[int, ...]]]:
    calls = list(CALLS)
    CALLS.clear()
    return calls


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(CASES["qwen3-moe-window"], tmp_path_factory.mktemp("together") / "model")


def runner_of(path: Path) -> ModelRunner:
    config = RunnerConfig(
        model=str(path), device="cpu", kernel_backend="torch", num_blocks=64, expert_parallel=True, dp_size=2,
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_STEP_TOKENS, max_model_len=MAX_LEN,
    )  # fmt: skip
    return build_runner(config, Group(), dp=Noted(0, 2))[0]


def run(runner: ModelRunner) -> tuple[BesideAnIdleRank, list[list[int]], Loop]:
    prompts = [list(range(5, 5 + length)) for length in (1, 30, 7, 40, 3)]
    beside = BesideAnIdleRank(runner)
    scheduler = SchedulerConfig(
        max_model_len=MAX_LEN, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_STEP_TOKENS, watermark=0.0
    )
    loop = Loop(beside, scheduler, CacheConfig(num_blocks=64))  # type: ignore[arg-type]
    take_calls()
    loop.run(*(make_sequence(number, prompt, 12) for number, prompt in enumerate(prompts)), each_step=1)
    return beside, prompts, loop


@pytest.mark.usefixtures("whole_experts")
def test_who_has_nothing_to_do_replays_the_pieces_of_the_others(saved: Saved) -> None:
    """Steps that are larger than any graph are made without by all. The tokens are those of the model."""
    runner = runner_of(saved.path)
    runner.capture(GraphSizes(tokens=SIZES.tokens), RecordedGraphs())
    beside, prompts, loop = run(runner)
    assert {8, 16} < beside.num_exchanged and max(beside.num_exchanged) > 16
    for number, prompt in enumerate(prompts):
        saved.assert_greedy(prompt, loop.tokens[number])


@pytest.mark.usefixtures("whole_experts")
def test_who_has_nothing_to_do_replays_the_whole_graphs_of_the_others(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention on a CPU depends on numbers, and is left out: the tokens are not the model's."""
    monkeypatch.setattr(GqaAttention, "attend", lambda layer, x: x.new_zeros(len(x), layer.output_size))
    runner = runner_of(saved.path)
    monkeypatch.setattr(CacheKernel, "graph_contexts", lambda _kernel, _rows, most: (most,))
    runner._parts.preparer._uniform_sizes = SIZES.rows
    runner.capture(SIZES, RecordedGraphs())
    beside, _, _ = run(runner)
    assert {1, 2, 4, 8, 16} < beside.num_exchanged
