"""Who gives up its blocks when there are none left."""

from collections.abc import Callable, Collection

from worker.core.config import PreemptionPolicy
from worker.core.sequence import Sequence

MAX_PREEMPTIONS = 2
"""A sequence preempted so often comes back with all the blocks it will ever need, and keeps them to its end.

So it needs no room that others must make, and can be let alone: it ends, whoever comes meanwhile.
"""


def choose_victim(
    running: Collection[Sequence], policy: PreemptionPolicy, step: int, requester: Sequence
) -> Sequence | None:
    """The running sequence to preempt for `requester` in `step`, or None if there is none.

    Never the requester, never one already scheduled in the step, never one that has its blocks for good, and never
    the senior. Either those with their blocks for good go on or the senior does, so every sequence that fits alone
    finishes in the end.
    """
    senior = senior_of(running)
    key = _KEYS[policy]
    return max(
        (
            seq
            for seq in running
            if seq is not requester
            and seq.last_step != step
            and not keeps_blocks(seq)
            and not belongs_to_senior(seq, senior)
        ),
        key=key,
        default=None,
    )


def keeps_blocks(seq: Sequence) -> bool:
    """Whether it has been preempted for the last time. Beams share blocks and change hands every round: never."""
    return seq.num_preemptions >= MAX_PREEMPTIONS and seq.beam_group is None


def senior_of(running: Collection[Sequence]) -> Sequence:
    """The running sequence that stands first in queue order."""
    return min(running, key=lambda seq: seq.order)


def belongs_to_senior(seq: Sequence, senior: Sequence) -> bool:
    """Whether `seq` is the senior, or a beam of the same search: those can finish only together."""
    return seq is senior or (seq.beam_group is not None and seq.beam_group is senior.beam_group)


def _last_admitted(seq: Sequence) -> tuple[int, ...]:
    # Sequences are admitted in arrival order, and keep it when they come back.
    return seq.order[1:]


def _least_urgent(seq: Sequence) -> tuple[int, ...]:
    return seq.order


def _shortest_remaining(seq: Sequence) -> tuple[int, ...]:
    return (seq.num_known_tokens - seq.max_length, *seq.order)


def _cheapest_recompute(seq: Sequence) -> tuple[int, ...]:
    return (-seq.num_computed_tokens, *seq.order)


_KEYS: dict[PreemptionPolicy, Callable[[Sequence], tuple[int, ...]]] = {
    "fcfs": _last_admitted,
    "priority": _least_urgent,
    "shortest_remaining": _shortest_remaining,
    "cheapest_recompute": _cheapest_recompute,
}
"""The greatest key is the victim."""
