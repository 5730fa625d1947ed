"""The largest step there can be, run once at start-up to see what it takes."""

from dataclasses import dataclass

import torch

from worker.core.batch import NewSequence, ScheduledBatch
from worker.core.params import SamplingParams
from worker.core.tokens import token_array
from worker.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes of a device."""

    used: int
    """Taken by anyone at the peak of the largest step, without a cache."""
    total: int
    activations: int
    """Of `used`, what the step itself takes."""


def measure_peak(runner: ModelRunner, largest: ScheduledBatch, cache_bytes: int, device: torch.device) -> PeakMemory:
    """Runs `largest` on a CUDA device. `cache_bytes`: of the cache that `runner` has for it, which does not count."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.execute(largest)
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return PeakMemory(total - free - cache_bytes + activations, total, activations)


def dummy_batch(num_tokens: int, max_num_seqs: int, block_size: int, max_model_len: int) -> ScheduledBatch:
    """A step of `num_tokens` tokens (as far as the sequences can be that long) in as many rows as there may be.

    All rows have one and the same block table, long enough for the longest: a cache of that many blocks will do.
    """
    lens: list[int] = []
    for rows_left in range(max_num_seqs, 0, -1):
        if num_tokens:
            lens.append(min(max_model_len, max(1, num_tokens // rows_left)))
            num_tokens -= lens[-1]
    blocks = tuple(range(-(-max(lens) // block_size)))
    sampling = SamplingParams(temperature=1.0)
    new = [NewSequence(slot, token_array([0] * n), n, sampling, blocks) for slot, n in enumerate(lens)]
    return ScheduledBatch(
        step=0, slots=list(range(len(lens))), num_scheduled_tokens=lens, num_computed_tokens=[0] * len(lens),
        input_ids=token_array([0] * sum(lens)), samples=[True] * len(lens), new_sequences=new, is_dummy=True,
    )  # fmt: skip
