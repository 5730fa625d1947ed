"""One sequence: its committed tokens, how far the cache has caught up, and where it stands.

`token_ids` holds committed tokens only. What the device has sampled and the host has not seen is a count,
`num_in_flight_tokens`. KV progress is `num_computed_tokens`, advanced when a step is scheduled: steps run in order, so
whatever is scheduled next finds it done. While a step with drafts is in flight both count as if all were right; when it
comes back they are put right, and nothing is scheduled in between.
"""

import enum
from array import array
from dataclasses import dataclass, field

from worker.core.beam import BeamSearch, Candidates
from worker.core.block_chain import Anchor, BlockChain
from worker.core.ngram_index import NgramIndex
from worker.core.outputs import SequenceTimings
from worker.core.params import BeamParams, SamplingParams, StopConditions
from worker.core.tokens import token_array

NO_LIMIT = 1 << 30


class SequenceStatus(enum.Enum):
    """Where a sequence is. Values of this enum change in `Sequence.move_to` only."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"
    ABORTED = "aborted"

    # Members are singletons; the hash of `Enum`, by name, is a call in Python.
    __hash__ = object.__hash__


_S = SequenceStatus
_ALLOWED_MOVES: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    # WAITING and SWAPPED may finish: a token sampled before the preemption can still arrive.
    _S.WAITING: frozenset({_S.RUNNING, _S.FINISHED, _S.ABORTED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.SWAPPED, _S.FINISHED, _S.ABORTED}),
    _S.SWAPPED: frozenset({_S.RUNNING, _S.FINISHED, _S.ABORTED}),
    _S.FINISHED: frozenset(),
    _S.ABORTED: frozenset(),
}


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Sequence:
    """State of one request's sequence. Plain data: scheduler and block manager change it, nobody else."""

    id: int
    """Unique in the engine."""
    token_ids: "array[int]"
    """Committed ones, a copy of what is given. Those after the prompt were generated earlier, by another worker."""
    num_prompt_tokens: int
    stop: StopConditions
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """The lower goes first."""
    deadline: float | None = None
    """In seconds on the scheduler's clock, as all times here."""
    cache_salt: bytes = b""
    arrival_time: float = 0.0
    parent_id: int | None = None
    index: int = 0
    beam: BeamParams | None = None

    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    num_resumed_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_in_flight_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    """Prompt tokens that its first admission found in the cache."""
    num_preemptions: int = field(default=0, init=False)
    num_draft_tokens: int = field(default=0, init=False)
    """Drafts that were tried, and of these, those that were right."""
    num_accepted_tokens: int = field(default=0, init=False)
    draft_limit: int = field(default=NO_LIMIT, init=False)
    """Most drafts of its next row, by how many of the last one's were right."""
    ngrams: NgramIndex | None = field(default=None, init=False)
    """Of its tokens, where an n-gram drafter has been asked about it."""
    time_queued: float = field(init=False)
    time_scheduled: float | None = field(default=None, init=False)
    time_first_token: float | None = field(default=None, init=False)

    # Set by the scheduler at `add`.
    order: tuple[int, int, int] = field(init=False)
    """Place in every queue: priority, arrival, index. Unique among unfinished sequences; never changes."""
    max_length: int = field(default=0, init=False)
    """Committed tokens at which it ends at the latest: by max_tokens, or by what context and cache can hold."""
    ending_token_ids: frozenset[int] = field(init=False)
    stopping_token_ids: frozenset[int] = field(init=False)
    """Tokens that may end it: those, and the last ones of stop sequences."""

    # Held while RUNNING (or, the host table, while SWAPPED).
    slot: int = field(default=-1, init=False)
    group_id: int = field(default=-1, init=False)
    restored_group: int = field(default=-1, init=False)
    """Whose content its own group begins with: its own, if that is there already; −1: with zeros."""
    checkpoints_at: list[int] = field(default_factory=list, init=False)
    """Computed tokens, rising, at which a step ends so that its state can be kept."""
    block_table: list[int] = field(default_factory=list, init=False)
    num_block_tokens: int = field(default=0, init=False)
    """Tokens that its blocks can hold."""
    host_block_table: list[int] = field(default_factory=list, init=False)
    bound_step: int = field(default=-1, init=False)
    """Step that told the runner about its present slot and table."""
    last_step: int = field(default=-1, init=False)
    """Last step it was scheduled in: its blocks stay put until that step is retired."""

    # Prefix cache, see block_manager.
    chain: BlockChain | None = field(default=None, init=False)
    anchor: Anchor | None = field(default=None, init=False)
    publish_at: int = field(default=0, init=False)
    """Computed tokens at which its next block is published."""

    beam_group: "BeamGroup | None" = field(default=None, init=False)
    num_prompt_logprobs: int = field(default=0, init=False)
    """How many were reported, of the tokens from the second on."""

    def __post_init__(self) -> None:
        self.token_ids = token_array(self.token_ids)
        self.num_resumed_tokens = len(self.token_ids) - self.num_prompt_tokens
        self.time_queued = self.arrival_time
        self.order = (self.priority, 0, self.index)
        self.ending_token_ids = self.stop.eos_token_ids | self.stop.stop_token_ids
        self.stopping_token_ids = self.ending_token_ids | self.stop.stop_sequences.last_token_ids

    @property
    def needs_whole_prompt(self) -> bool:
        """Every prompt token has to be computed, in a cache or not: their log probabilities are asked for."""
        return self.sampling.num_prompt_logprobs is not None and self.time_first_token is None

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Committed tokens and those that the device has sampled or will sample in steps already scheduled."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Committed tokens after the prompt, those of an earlier worker included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def timings(self) -> SequenceTimings:
        """So far."""
        return SequenceTimings(
            self.time_queued,
            self.time_scheduled,
            self.time_first_token,
            self.num_preemptions,
            self.num_draft_tokens,
            self.num_accepted_tokens,
        )

    @property
    def is_ended(self) -> bool:
        return self.status is SequenceStatus.FINISHED or self.status is SequenceStatus.ABORTED

    @property
    def is_bound(self) -> bool:
        """Whether a step has told the runner about it since it became RUNNING; false for a fresh fork only."""
        return self.last_step >= 0

    def move_to(self, status: SequenceStatus) -> None:
        """The one place where the status changes. Raises `RuntimeError` on a move that the design does not have."""
        if status not in _ALLOWED_MOVES[self.status]:
            raise RuntimeError(f"sequence {self.id} cannot go from {self.status.name} to {status.name}")
        self.status = status


@dataclass(slots=True)
class BeamGroup:
    """One search as the scheduler sees it.

    The public sequence (root) runs the prompt. Then each beam is an internal sequence, made anew in every step as a
    fork of the beam it continues, so that committed tokens of a sequence never change.
    """

    root: Sequence
    search: BeamSearch
    members: list[Sequence]
    slots: list[int] = field(default_factory=list)
    """`width` slots for the whole life of the search, once the root was admitted; beam i uses the i-th."""
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """Member's id → what came of its row in this round."""
