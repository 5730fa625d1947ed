"""Who gives up its blocks when there are none left. Seniority decides, so that everybody gets on."""

from collections.abc import Callable, Collection

from worker.core.config import PreemptionPolicy
from worker.core.sequence import Sequence


def choose_victim(running: Collection[Sequence], policy: PreemptionPolicy, step: int) -> Sequence | None:
    """The running sequence to preempt in `step`, be it the one that asks for blocks; None if nobody may be preempted.

    Never one already scheduled in the step, and never the senior, who therefore always goes on: every sequence that
    fits alone finishes in the end. Of the others those go first that were preempted least often (among equals in
    priority, where that is the policy), so nobody gives way again and again for who came later.
    """
    senior = senior_of(running)
    return max(
        (seq for seq in running if seq.last_step != step and not belongs_to_senior(seq, senior)),
        key=_KEYS[policy],
        default=None,
    )


def senior_of(running: Collection[Sequence]) -> Sequence:
    """The running sequence that stands first in queue order."""
    return min(running, key=lambda seq: seq.order)


def belongs_to_senior(seq: Sequence, senior: Sequence) -> bool:
    """Whether `seq` is the senior, or a beam of the same search: those can finish only together."""
    return seq is senior or (seq.beam_group is not None and seq.beam_group is senior.beam_group)


def _last_admitted(seq: Sequence) -> tuple[int, ...]:
    # Sequences are admitted in arrival order, and keep it when they come back.
    return (-seq.num_preemptions, *seq.order[1:])


def _least_urgent(seq: Sequence) -> tuple[int, ...]:
    priority, *arrival = seq.order
    return (priority, -seq.num_preemptions, *arrival)


def _shortest_remaining(seq: Sequence) -> tuple[int, ...]:
    return (-seq.num_preemptions, seq.num_known_tokens - seq.max_length, *seq.order)


def _cheapest_recompute(seq: Sequence) -> tuple[int, ...]:
    return (-seq.num_preemptions, -seq.num_computed_tokens, *seq.order)


_KEYS: dict[PreemptionPolicy, Callable[[Sequence], tuple[int, ...]]] = {
    "fcfs": _last_admitted,
    "priority": _least_urgent,
    "shortest_remaining": _shortest_remaining,
    "cheapest_recompute": _cheapest_recompute,
}
"""The greatest key is the victim."""
