"""What the scheduler tells the engine: tokens and endings of sequences, and its own load."""

from dataclasses import dataclass
from typing import NamedTuple

from worker.core.batch import TokenLogprobs
from worker.core.stopping import FinishReason


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """How long a sequence spent in each phase; None for those it did not reach."""

    queued: float | None
    prefill: float | None
    decode: float | None


@dataclass(slots=True)
class SequenceTimings:
    """Times on the scheduler's clock, in seconds, None if it never came to that; and what happened in between."""

    queued: float
    scheduled: float | None
    first_token: float | None
    num_preemptions: int
    num_draft_tokens: int = 0
    """Drafts that were tried, and of these, those that were right."""
    num_accepted_tokens: int = 0

    def phases(self, end: float) -> PhaseSeconds:
        """Of a sequence that ended at `end`, on the same clock."""
        if self.scheduled is None:
            return PhaseSeconds(end - self.queued, None, None)
        queued = self.scheduled - self.queued
        if self.first_token is None:
            return PhaseSeconds(queued, end - self.scheduled, None)
        return PhaseSeconds(queued, self.first_token - self.scheduled, end - self.first_token)


@dataclass(slots=True)
class Hypothesis:
    """One finished beam: its generated tokens, its length-normalised score, and what ended it."""

    token_ids: list[int]
    score: float
    finish_reason: FinishReason


@dataclass(slots=True)
class SequenceOutput:
    """News of one sequence. A terminal one (`finish_reason` set) comes exactly once and is the last.

    A beam search reports nothing until its terminal output, whose `token_ids` are those of the best hypothesis and
    whose `hypotheses` are all of them, best first.
    """

    sequence_id: int
    index: int
    token_offset: int
    """Index of the first of `token_ids` in the completion."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    detail: str = ""
    is_request_fault: bool = False
    """With ERROR: the request's own rules cannot be met."""
    num_cached_tokens: int = 0
    """Set, as is `timings`, on the first output with tokens and on the terminal one: who ends a sequence before its own
    end hears of the first alone."""
    timings: SequenceTimings | None = None
    hypotheses: list[Hypothesis] | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One for each prompt token but the first, if asked for: those of a step in an output of its own, before tokens."""
    prompt_logprobs_offset: int = 0
    """How many came before."""

    def prepend(self, earlier: "SequenceOutput") -> None:
        """Carry the tokens of the one before, of the same sequence, too. Neither may have those of the prompt."""
        self.token_offset = earlier.token_offset
        self.token_ids = earlier.token_ids + self.token_ids
        if earlier.logprobs is not None:
            self.logprobs = earlier.logprobs + (self.logprobs or [])
        if earlier.timings is not None and self.timings is None:
            self.num_cached_tokens, self.timings = earlier.num_cached_tokens, earlier.timings


class LoadSnapshot(NamedTuple):
    """Load at one moment, and counters since start (from `num_prefix_queries` on)."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_used_blocks: int
    num_free_blocks: int
    """Free for the taking, those with cached content included."""
    num_cached_blocks: int
    """Free blocks whose content can still be hit."""
    num_used_host_blocks: int
    num_groups: int
    """State groups of sequences; 0 for models without recurrent state."""
    num_used_groups: int
    num_waiting_tokens: int
    """Committed tokens of the queue: an upper bound of the prefill that is due."""
    num_prefix_queries: int
    """Tokens looked up in the prefix index at admission."""
    num_prefix_hits: int
    """Tokens of those that were found."""
    num_preemptions: int
    num_swaps: int
    num_evictions: int
    num_steps: int
    num_scheduled_tokens: int
    num_generated_tokens: int
    num_finished: int
    num_draft_tokens: int
    """Drafts that were tried."""
    num_accepted_tokens: int
    """Of these, those that were right."""
    accepted_counts: tuple[int, ...]
    """Rows with drafts by how many of them were right, from 0 on; empty without speculation."""
