"""One of two tensor-parallel ranks, in a process of its own. It imports nothing of `transformers`, which takes long."""

from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.runner.driver import Driver
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

LENGTHS = (3, 17)
STEPS = 8
SMALLEST_VOCABULARY = 99


def run_rank(rank: int, store: str, paths: dict[str, str], results: "Queue[Any]") -> None:
    """Puts (name, texts, logits of each step but the last ones, which try drafts) of each model of `paths` into
    `results`, on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for name, path in paths.items():
            texts, logits = _generate(path, Group(rank, 2, dist.group.WORLD))
            if rank == 0:
                results.put((name, texts, [step.tolist() for step in logits]))
    except Exception as error:
        results.put((f"rank {rank} failed", repr(error), None))
        raise


def _generate(path: str, group: Group) -> tuple[list[list[int]], list[Tensor]]:
    config = RunnerConfig(
        model=path, device="cpu", num_blocks=32, max_num_seqs=4, quantization="none", num_speculative_tokens=2
    )
    runner, info = build_runner(config, group)
    plain, seen = runner._model.logits, []

    def logits(hidden: Tensor) -> Tensor | None:
        found = plain(hidden)
        if found is not None:
            seen.append(found)
        return found

    runner._model.logits = logits  # type: ignore[method-assign]
    driver = Driver(runner, info.num_blocks, info.block_size, info.num_groups)
    generator = torch.Generator().manual_seed(1)
    seqs = [driver.add(torch.randint(SMALLEST_VOCABULARY, (n,), generator=generator).tolist()) for n in LENGTHS]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=STEPS - 1)
    logits_of_steps = seen[:]
    for drafts in ([5, 7], [11], [3, 3]):
        driver.verify(seqs[1], drafts)
    driver.decode(*seqs, steps=2)
    return [seq.tokens for seq in seqs], logits_of_steps
