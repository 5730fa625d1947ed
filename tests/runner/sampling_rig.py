"""Rows to sample, made the way the runner makes them: sequences bound to slots, then a plan."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.core.batch import NewSequence, ScheduledBatch
from worker.core.params import SamplingParams
from worker.core.tokens import token_array
from worker.kernels.select import Kernels
from worker.runner.slots import SlotState
from worker.runner.staging import Staging
from worker.sampling.edits import History
from worker.sampling.rules import SlotRules
from worker.sampling.sampler import Sampled, Sampler, SamplingRows

CPU = torch.device("cpu")
SAMPLER = Sampler(Kernels(CPU))
MAX_MODEL_LEN = 64


def sequence(
    slot: int, params: SamplingParams, prompt: Sequence[int] = (0,), output: Sequence[int] = (), **others: object
) -> NewSequence:
    return NewSequence(slot, token_array([*prompt, *output]), len(prompt), params, (), **others)  # type: ignore[arg-type]


def rows_of(sequences: list[NewSequence], vocab_size: int, positions: list[int] | None = None) -> SamplingRows:
    """Slots 0, 1, … in this order. Positions: by default those after the sequences' tokens."""
    slots = SlotState(len(sequences), 1, MAX_MODEL_LEN, vocab_size, CPU, spare_block=0)
    batch = ScheduledBatch(0, [], [], [], token_array(), [], new_sequences=sequences)
    slots.apply(Staging(CPU).to_device(slots.stage(batch)))
    positions = positions or [len(new.token_ids) for new in sequences]
    return SamplingRows(
        rules=slots.rules.of(list(range(len(sequences)))),
        parameters=slots.parameters,
        allowed=slots.allowed,
        history=History(
            slots.tables.tokens,
            torch.arange(len(sequences)),
            torch.tensor(positions),
            max(positions),
        ),
    )


def sample_rows(logits: Tensor, sequences: list[NewSequence], positions: list[int] | None = None) -> Sampled:
    return SAMPLER.sample(logits.clone(), rows_of(sequences, logits.shape[1], positions))


def sample(logits: Tensor, params: list[SamplingParams], positions: list[int] | None = None) -> list[int]:
    """Token ids of rows that have no history to speak of."""
    sequences = [sequence(slot, p) for slot, p in enumerate(params)]
    return sample_rows(logits, sequences, positions or [7] * len(params)).token_ids.tolist()


def many_draws(logits: Tensor, new: NewSequence, num: int) -> Tensor:
    """`num` draws of one sequence's next token, int64 [num], as if at positions 0, 1, …"""
    one = rows_of([new], logits.shape[1])
    position = one.history.positions
    rules = SlotRules(1, logits.shape[1], CPU)
    rules.bind(new)
    parameters = one.parameters.select(torch.zeros(num, dtype=torch.int64))
    # The seed in place of the position: penalties read that. A slot a row, all with the same tokens.
    parameters.seed[:, 0] = torch.arange(num)
    rows = SamplingRows(
        rules=rules.of([0] * num),
        history=History(
            one.history.tokens[:1].expand(num, -1), torch.arange(num), position.expand(num), one.history.longest
        ),
        parameters=parameters,
        allowed=one.allowed[:1].expand(num, -1),
    )
    return SAMPLER.sample(logits.expand(num, -1).clone(), rows).token_ids


def noise(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def chi_squared(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    kept = expected > 0
    assert counts[~kept].sum() == 0, "a token outside the distribution was drawn"
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


def fits(tokens: Tensor, probabilities: Tensor) -> bool:
    """Chi-squared: at most 5 standard deviations above the mean."""
    freedom = int((probabilities > 0).sum()) - 1
    counts = tokens.bincount(minlength=len(probabilities)).double()
    return chi_squared(counts, probabilities) <= freedom + 5 * (2 * freedom) ** 0.5 if freedom else True
