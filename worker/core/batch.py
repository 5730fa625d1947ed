"""What one step is (`ScheduledBatch`, scheduler → runner) and what came of it (`BatchOutput`, runner → scheduler).

Both are plain immutable data, and named tuples, which are made and pickled in a third of a dataclass's time: a
tensor-parallel rank or a remote runner needs nothing else.

A **slot** is a row of the runner's persistent per-sequence state, 0 ≤ slot < max_num_seqs. The scheduler owns the
assignment: a slot belongs to one sequence from the step whose `new_sequences` bind it until another `NewSequence` binds
it again. Steps run in the order they were submitted, so binding a slot anew is enough to forget its former owner.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worker.core.params import SamplingParams

DEFERRED_TOKEN = -1
"""In `ScheduledBatch.input_ids`: "the token that this slot sampled in an earlier step", still only on the device."""
DRAFTED_TOKEN = -2
"""In `ScheduledBatch.input_ids`, in the place of a draft: "what the runner's own draft model proposes"."""


TokenLogprobs = list[tuple[int, float, int]]
"""Of one position: (token id, log probability, rank), the chosen token first, then the most likely ones in order.

Log probabilities are the model's own, before any sampling parameter; rank 1 is the most likely token.
"""


class NewSequence(NamedTuple):
    """Everything the runner must know about a slot, sent when a sequence is bound to it.

    That is at first admission and again after each preemption by recompute (and for each child of a fork): the runner
    keeps nothing of an earlier binding.
    """

    slot: int
    token_ids: "array[int]"
    """Committed tokens, prompt and output, a copy. The tokens to run still come in `input_ids`."""
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: tuple[int, ...]
    """The block table so far, including the blocks for this step. Later blocks come as `new_block_ids`."""
    group_id: int = -1
    """State group of the request (see `PoolKind.STATE`), −1 if the model has none."""
    restored_group: int = -1
    """Whose content that group begins with: its own, if that is there already; −1: with zeros."""
    min_length: int = 0
    """No ending token is sampled for a position before this (prompt and min_tokens together)."""
    ending_token_ids: tuple[int, ...] = ()
    """Needed where `min_length` is not reached yet, else empty."""


class ScheduledBatch(NamedTuple):
    """One step. All per-row lists are aligned with `slots`; rows with more than one token may stand anywhere."""

    step: int
    slots: list[int]
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    """Tokens of the row whose KV is in the cache before this step: the position of its first input token."""
    input_ids: "array[int]"
    """Flat, rows one after another; `DEFERRED_TOKEN` where the host does not know the token yet."""
    samples: list[bool]
    """Whether the row's last token reaches the end of the known sequence, so that a token is sampled."""
    new_sequences: Sequence[NewSequence] = ()
    new_block_ids: Sequence[tuple[int, list[int]]] = ()
    """(slot, blocks to append to its table), for slots bound in an earlier step."""
    replaced_block_ids: Sequence[tuple[int, int, int]] = ()
    """(slot, index in its table, new block): after copy-on-write. Applied before the step runs."""
    blocks_to_copy: Sequence[tuple[int, int]] = ()
    """(source, destination) device blocks. Order: swap out, copy, swap in, then the step."""
    blocks_to_swap_out: Sequence[tuple[int, int]] = ()
    """(device block, host block)."""
    blocks_to_swap_in: Sequence[tuple[int, int]] = ()
    """(host block, device block)."""
    states_to_copy: Sequence[tuple[int, int]] = ()
    """(source, destination) state groups, before those of new sequences get what they begin with."""
    blocks_to_zero: Sequence[int] = ()
    """Secure mode: device blocks to clear, before anything else in the step."""
    num_candidates: int = 0
    """Beam search: when positive, return this many best next tokens with log probabilities for each beam row."""
    beam_rows: Sequence[int] = ()
    """Rows (indices into `slots`) that belong to a beam; they return candidates in place of a sampled token."""
    num_draft_tokens: Mapping[int, int] = {}
    """Row → how many of its tokens, the last ones, are drafts: guesses of what follows its one committed token.

    A token is sampled at each position of such a row, as if there were no drafts. The row gets them up to the first
    that is not the draft of its place, that one included.
    """
    is_dummy: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes, all rows together."""
        return len(self.input_ids)


FIRST_NEWS = ScheduledBatch._fields.index("new_sequences")
"""From this field on a batch says what is out of the ordinary; where it does not, all are false."""


class BatchOutput(NamedTuple):
    """What the runner returns for a step. Lists are aligned with the batch's `slots`."""

    step: int
    token_ids: list[list[int]]
    """New tokens of each row, in order: one for a sampling row, the accepted drafts and one more for a row with drafts,
    else none."""
    errors: Mapping[int, str] = {}
    """Row → what went wrong: what the model computed is not finite, be the row sampled or not, or nothing is allowed.

    Such a row has no tokens. A row without an error has only finite keys and values in the cache, up to its last token
    or accepted draft: that one has looked at all of them.
    """
    unsatisfiable_rows: Sequence[int] = ()
    """Of the rows in `errors`, those whose own request is to blame: its rules leave no token."""
    logprobs: Mapping[int, list[TokenLogprobs]] = {}
    """Row → one entry for each of its new tokens; rows that ask for them only."""
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = {}
    """Row → one entry for each prompt token that follows a token of this step, in order; where asked for."""
    candidates: Mapping[int, list[tuple[int, float]]] = {}
    """Row → `num_candidates` (token id, log probability), best first; beam rows only."""
    run_seconds: float = 0.0
    """Time the device spent on this step, for the delay factor and for statistics."""
