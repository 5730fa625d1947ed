"""Steps of workers that share experts: all ranks ask for the same collectives, whatever each has to do."""

from types import SimpleNamespace

import pytest
import torch

from worker.core.batch import ScheduledBatch
from worker.core.cache.pools import PoolKind, PoolSpec
from worker.parallel.group import Group
from worker.runner import assembly
from worker.runner.config import RunnerConfig
from worker.runner.probe import PeakMemory


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
