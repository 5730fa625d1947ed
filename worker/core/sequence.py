"""One sequence: its committed tokens, how far the cache has caught up, and where it stands.

`token_ids` holds committed tokens only. What the device has sampled and the host has not seen is a count,
`num_in_flight_tokens`. KV progress is `num_computed_tokens`, advanced when a step is scheduled: steps run in order, so
whatever is scheduled next finds it done.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.core.beam import BeamSearch, Candidates
from worker.core.block_chain import Anchor, BlockChain
from worker.core.params import BeamParams, SamplingParams, StopConditions
from worker.core.tokens import token_array


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


class Sequence:
    """State of one request's sequence. Plain data: scheduler and block manager change it, nobody else."""

    __slots__ = (
        "anchor",
        "arrival_time",
        "beam",
        "beam_group",
        "block_table",
        "bound_step",
        "cache_salt",
        "chain",
        "deadline",
        "ending_token_ids",
        "group_id",
        "host_block_table",
        "id",
        "index",
        "last_step",
        "max_length",
        "num_block_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_resumed_tokens",
        "order",
        "parent_id",
        "priority",
        "publish_at",
        "sampling",
        "slot",
        "status",
        "stop",
        "stopping_token_ids",
        "time_first_token",
        "time_queued",
        "time_scheduled",
        "token_ids",
    )

    def __init__(
        self,
        *,
        id: int,
        token_ids: Iterable[int],
        num_prompt_tokens: int,
        stop: StopConditions,
        sampling: SamplingParams | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: bytes = b"",
        arrival_time: float = 0.0,
        parent_id: int | None = None,
        index: int = 0,
        beam: BeamParams | None = None,
    ) -> None:
        """`id` is unique in the engine. Tokens after `num_prompt_tokens` were generated earlier, by another worker.

        `deadline` and `arrival_time` are seconds on the scheduler's clock; lower `priority` goes first.
        """
        self.id = id
        self.token_ids = token_array(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_resumed_tokens = len(self.token_ids) - num_prompt_tokens
        self.sampling = sampling if sampling is not None else SamplingParams()
        self.stop = stop
        self.priority = priority
        self.deadline = deadline
        self.cache_salt = cache_salt
        self.arrival_time = arrival_time
        self.parent_id = parent_id
        self.index = index
        self.beam = beam

        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens that its first admission found in the cache."""
        self.num_preemptions = 0
        self.time_queued = arrival_time
        self.time_scheduled: float | None = None
        self.time_first_token: float | None = None

        # Set by the scheduler at `add`.
        self.order: tuple[int, int, int] = (priority, 0, index)
        """Place in every queue: priority, arrival, index. Unique among unfinished sequences; never changes."""
        self.max_length = 0
        """Committed tokens at which it ends at the latest: by max_tokens, or by what context and cache can hold."""
        self.ending_token_ids: frozenset[int] = stop.eos_token_ids | stop.stop_token_ids
        self.stopping_token_ids: frozenset[int] = self.ending_token_ids | stop.stop_sequences.last_token_ids
        """Tokens that may end it: those, and the last ones of stop sequences."""

        # Held while RUNNING (or, the host table, while SWAPPED).
        self.slot = -1
        self.group_id = -1
        self.block_table: list[int] = []
        self.num_block_tokens = 0
        """Tokens that its blocks can hold."""
        self.host_block_table: list[int] = []
        self.bound_step = -1
        """Step that told the runner about its present slot and table."""
        self.last_step = -1
        """Last step it was scheduled in: its blocks stay put until that step is retired."""

        # Prefix cache, see block_manager.
        self.chain: BlockChain | None = None
        self.anchor: Anchor | None = None
        self.publish_at = 0
        """Computed tokens at which its next block can be published."""

        self.beam_group: BeamGroup | None = None
        self.num_prompt_logprobs = 0
        """How many were reported, of the tokens from the second on."""

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
