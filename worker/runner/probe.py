"""The largest step there can be, run once at start-up to see what it takes."""

from dataclasses import dataclass

import torch

from worker.core.batch import ScheduledBatch
from worker.core.tokens import token_array
from worker.runner.graphs import GraphSizes
from worker.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes of a device."""

    used: int
    """Taken by anyone at the peak of the largest step, without a cache."""
    total: int
    activations: int
    """Of `used`, what the step itself takes."""
    graphs: int
    """Of `used`, what CUDA graphs take."""


def measure_peak(
    runner: ModelRunner, largest: ScheduledBatch, graphs: GraphSizes | None, device: torch.device
) -> PeakMemory:
    """Runs `largest` on a CUDA device, and captures `graphs`, whose memory the smaller ones share. `runner` has the
    spare block and group alone."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.execute(largest)
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    without_graphs, total = torch.cuda.mem_get_info(device)
    if graphs is not None:
        runner.capture(graphs)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    return PeakMemory(total - free + activations, total, activations, without_graphs - free)


def dummy_batch(num_tokens: int, num_slots: int, max_model_len: int) -> ScheduledBatch:
    """A step of `num_tokens` tokens (as far as rows can be that long) in as many rows as there are slots.

    All of it is on the spare slot and the spare block: sequences that live beside it are not touched.
    """
    lens: list[int] = []
    for rows_left in range(num_slots, 0, -1):
        if num_tokens:
            lens.append(min(max_model_len, max(1, num_tokens // rows_left)))
            num_tokens -= lens[-1]
    return ScheduledBatch(
        step=0, slots=[num_slots] * len(lens), num_scheduled_tokens=lens, num_computed_tokens=[0] * len(lens),
        input_ids=token_array([0] * sum(lens)), samples=[True] * len(lens), is_dummy=True,
    )  # fmt: skip
