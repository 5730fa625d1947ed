"""Collects one step while it is scheduled."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from worker.core.batch import DEFERRED_TOKEN, NewSequence, ScheduledBatch
from worker.core.params import SamplingParams
from worker.core.sequence import Sequence
from worker.core.tokens import token_array


class BatchBuilder:
    """Rows and side effects of the step that is being built. Short-lived; owned by the planner."""

    __slots__ = (
        "beam_rows",
        "budget",
        "copies",
        "given_host_blocks",
        "has_prefill",
        "input_ids",
        "is_blocked",
        "new_block_ids",
        "new_sequences",
        "num_candidates",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_scheduled_tokens",
        "pinned_blocks",
        "rows",
        "samples",
        "slots",
        "step",
        "swap_in",
    )

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        """Tokens still to hand out."""
        self.is_blocked = False
        """A running sequence found no block in this step: no new ones are admitted."""
        self.has_prefill = False
        self.rows: list[Sequence] = []
        self.slots: list[int] = []
        self.num_scheduled_tokens: list[int] = []
        self.num_computed_tokens: list[int] = []
        self.input_ids = token_array()
        self.samples: list[bool] = []
        self.new_sequences: list[NewSequence] = []
        self.new_block_ids: list[tuple[int, list[int]]] = []
        self.copies: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.pinned_blocks: list[int] = []
        """Sources of copies, held so that nothing in this step overwrites them before they are read."""
        self.given_host_blocks: list[int] = []
        """Host blocks of sequences swapped in: free only after the step, because copies out come before copies in."""
        self.beam_rows: list[int] = []
        self.num_candidates = 0
        self.num_draft_tokens: dict[int, int] = {}

    def add_row(self, seq: Sequence, num_tokens: int) -> bool:
        """Gives `seq` its next `num_tokens`, for which it has blocks; returns whether a token will be sampled."""
        computed = seq.num_computed_tokens
        end = computed + num_tokens
        committed = len(seq.token_ids)
        samples = end == seq.num_known_tokens
        self.rows.append(seq)
        self.slots.append(seq.slot)
        self.num_scheduled_tokens.append(num_tokens)
        self.num_computed_tokens.append(computed)
        self.input_ids += seq.token_ids[computed:end]
        if end > committed:
            self.input_ids.extend([DEFERRED_TOKEN] * (end - max(committed, computed)))
        self.samples.append(samples)
        self.budget -= num_tokens
        seq.num_computed_tokens = end
        seq.last_step = self.step
        if num_tokens > 1 or computed < seq.num_prompt_tokens:
            self.has_prefill = True
        return samples

    def add_decode(self, seq: Sequence, drafts: Seq[int]) -> None:
        """Gives `seq`, which has one token to compute, that one and `drafts` after it. It has blocks for them."""
        computed, num_tokens = seq.num_computed_tokens, 1 + len(drafts)
        if drafts:
            self.num_draft_tokens[len(self.rows)] = len(drafts)
        self.rows.append(seq)
        self.slots.append(seq.slot)
        self.num_scheduled_tokens.append(num_tokens)
        self.num_computed_tokens.append(computed)
        self.input_ids.append(seq.token_ids[-1])
        self.input_ids.extend(drafts)
        self.samples.append(True)
        self.budget -= num_tokens
        seq.num_computed_tokens = computed + num_tokens
        seq.num_in_flight_tokens += num_tokens
        seq.last_step = self.step

    def mark_beam(self, num_candidates: int) -> None:
        """The last row returns candidates in place of a sampled token."""
        self.beam_rows.append(len(self.rows) - 1)
        self.num_candidates = max(self.num_candidates, num_candidates)

    def bind(self, seq: Sequence) -> None:
        """Tells the runner all about `seq`; its slot, table and group are set, blocks of this step included."""
        seq.bound_step = self.step
        min_length = seq.num_prompt_tokens + seq.stop.min_tokens if seq.stop.min_tokens else 0
        self.new_sequences.append(
            NewSequence(
                slot=seq.slot,
                token_ids=seq.token_ids[:],
                num_prompt_tokens=seq.num_prompt_tokens,
                sampling=seq.sampling if seq.needs_whole_prompt else _without_prompt_logprobs(seq.sampling),
                block_ids=tuple(seq.block_table),
                group_id=seq.group_id,
                restored_group=seq.restored_group,
                min_length=min_length,
                ending_token_ids=tuple(seq.ending_token_ids) if min_length > seq.num_tokens else (),
            )
        )

    def build(
        self, blocks_to_zero: list[int], swap_out: list[tuple[int, int]], states: list[tuple[int, int]]
    ) -> ScheduledBatch:
        """The finished step."""
        return ScheduledBatch(
            step=self.step,
            slots=self.slots,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_computed_tokens=self.num_computed_tokens,
            input_ids=self.input_ids,
            samples=self.samples,
            new_sequences=self.new_sequences,
            new_block_ids=self.new_block_ids,
            blocks_to_copy=self.copies,
            blocks_to_swap_out=swap_out,
            blocks_to_swap_in=self.swap_in,
            states_to_copy=states,
            blocks_to_zero=blocks_to_zero,
            num_candidates=self.num_candidates,
            beam_rows=self.beam_rows,
            num_draft_tokens=self.num_draft_tokens,
        )


def _without_prompt_logprobs(sampling: SamplingParams) -> SamplingParams:
    """They were reported before a preemption."""
    return sampling if sampling.num_prompt_logprobs is None else replace(sampling, num_prompt_logprobs=None)
