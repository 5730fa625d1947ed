"""The largest step there can be, run once at start-up to see what it takes."""

from dataclasses import dataclass

import torch

from worker.core.batch import NewSequence, ScheduledBatch
from worker.core.params import SamplingParams
from worker.core.tokens import token_array
from worker.runner.graphs import GraphSizes
from worker.runner.model_runner import ModelRunner

DEMANDING = SamplingParams(
    temperature=0.8, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
    logit_bias=((0, 1.0),), banned_token_ids=(0,), bad_token_sequences=((0, 0),), num_logprobs=20,
)  # fmt: skip
"""What takes the most memory beside the logits."""


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


def dummy_batch(num_tokens: int, num_slots: int, max_model_len: int, *, num_rows: int | None = None) -> ScheduledBatch:
    """A step of `num_tokens` tokens (as far as rows can be that long) in `num_rows` rows, by default as many as there
    are slots.

    All of it is on the spare slot and the spare block: sequences that live beside it are not touched.
    """
    lens: list[int] = []
    for rows_left in range(num_rows or num_slots, 0, -1):
        if num_tokens:
            lens.append(min(max_model_len, max(1, num_tokens // rows_left)))
            num_tokens -= lens[-1]
    return ScheduledBatch(
        step=0, slots=[num_slots] * len(lens), num_scheduled_tokens=lens, num_computed_tokens=[0] * len(lens),
        input_ids=token_array([0] * sum(lens)), samples=[True] * len(lens), is_dummy=True,
    )  # fmt: skip


def largest_batch(num_tokens: int, num_slots: int, max_model_len: int, num_drafts: int = 0) -> ScheduledBatch:
    """As `dummy_batch`, with all that sampling can be asked for, and `num_drafts` of each row as far as it has so many
    tokens. It stays bound to the spare slot."""
    batch = dummy_batch(num_tokens, num_slots, max_model_len)
    drafts = {row: min(num - 1, num_drafts) for row, num in enumerate(batch.num_scheduled_tokens)}
    return batch._replace(
        num_draft_tokens={row: num for row, num in drafts.items() if num},
        new_sequences=[NewSequence(num_slots, token_array([0]), 1, DEMANDING, ())],
    )
