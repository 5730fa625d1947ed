"""Who is chosen to give way: the pure choice, by hand-made candidates."""

import pytest

from tests.core.builders import make_sequence
from worker.core.scheduling.preemption import choose_victim, senior_of
from worker.core.sequence import Sequence

STEP = 50
ALL_POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest_remaining", "cheapest_recompute"])


def runner(
    id: int, *, computed: int = 10, max_length: int = 100, priority: int = 0, preemptions: int = 0, last_step: int = 49
) -> Sequence:
    """A running sequence as the choice sees it; it arrived as the `id`-th."""
    seq = make_sequence(id, 10, priority=priority)
    seq.order = (priority, id, 0)
    seq.num_computed_tokens = computed
    seq.max_length = max_length
    seq.num_preemptions = preemptions
    seq.last_step = last_step
    return seq


def victim(running: list[Sequence], policy: str = "fcfs") -> int | None:
    chosen = choose_victim(running, policy, STEP)
    return None if chosen is None else chosen.id


def test_fcfs_takes_the_last_admitted() -> None:
    assert victim([runner(1), runner(2), runner(3)]) == 3


def test_fcfs_does_not_look_at_priorities() -> None:
    assert victim([runner(1), runner(2, priority=9), runner(3)]) == 3


def test_priority_takes_the_least_urgent() -> None:
    assert victim([runner(1), runner(2, priority=9), runner(3, priority=4)], "priority") == 2


def test_priority_takes_the_later_arrival_at_equal_priority() -> None:
    assert victim([runner(1), runner(2, priority=4), runner(3, priority=4)], "priority") == 3


def test_shortest_remaining_takes_the_one_nearest_to_its_end() -> None:
    running = [runner(1), runner(2, max_length=12), runner(3, max_length=14), runner(4)]
    assert victim(running, "shortest_remaining") == 2


def test_shortest_remaining_counts_tokens_in_flight() -> None:
    running = [runner(1), runner(2, max_length=13), runner(3, max_length=12)]
    running[1].num_in_flight_tokens = 2
    assert victim(running, "shortest_remaining") == 2


def test_cheapest_recompute_takes_the_one_that_has_computed_least() -> None:
    assert victim([runner(1), runner(2, computed=5), runner(3, computed=30)], "cheapest_recompute") == 2


@pytest.mark.parametrize("policy", ["shortest_remaining", "cheapest_recompute"])
def test_ties_go_to_the_later_arrival(policy: str) -> None:
    assert victim([runner(1), runner(2), runner(3)], policy) == 3


@ALL_POLICIES
def test_the_last_gives_way_whoever_asks(policy: str) -> None:
    assert victim([runner(1), runner(2), runner(3)], policy) == 3


@ALL_POLICIES
def test_senior_is_never_chosen(policy: str) -> None:
    running = [runner(1, computed=0, max_length=11), runner(2, last_step=STEP)]
    assert victim(running, policy) is None


def test_sequence_scheduled_in_this_step_is_never_chosen() -> None:
    assert victim([runner(1), runner(2), runner(3, last_step=STEP)]) == 2


@ALL_POLICIES
def test_who_was_preempted_less_often_goes_first(policy: str) -> None:
    running = [runner(1), runner(2, preemptions=1), runner(3, preemptions=2, computed=1, max_length=12)]
    assert victim(running, policy) == 2


def test_urgency_counts_more_than_preemptions() -> None:
    assert victim([runner(1), runner(2), runner(3, priority=4, preemptions=5)], "priority") == 3


def test_urgent_latecomer_is_senior() -> None:
    assert senior_of([runner(1), runner(2), runner(3, priority=-1)]).id == 3
