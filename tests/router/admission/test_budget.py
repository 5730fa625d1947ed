"""Who gets what of something that there is only so much of."""

import pytest

from fissile.errors import ResourceExhaustedError
from router.admission.budget import Budget
from router.admission.unread import STEP, UnreadBytes


def fill(budget, client, amount=1):
    """Take until it is refused; returns what the client then holds."""
    try:
        while True:
            budget.take(client, amount)
    except ResourceExhaustedError:
        return budget.held_by(client)


def test_who_is_alone_gets_four_fifths_and_others_find_room():
    budget = Budget(1000, "things", "max-things")
    assert [fill(budget, "greedy"), fill(budget, "second"), fill(budget, "third")] == [800, 160, 32]
    budget.take("fourth", 1)


def test_two_that_take_in_turn_get_equal_shares():
    budget = Budget(900, "things", "max-things")
    for _ in range(500):
        for client in ("a", "b"):
            try:
                budget.take(client, 1)
            except ResourceExhaustedError:
                continue
    assert (budget.held_by("a"), budget.held_by("b")) == (400, 400)


def test_the_first_thing_of_a_client_need_only_be_there():
    budget = Budget(100, "things", "max-things")
    budget.take("a", 100)
    with pytest.raises(ResourceExhaustedError) as refused:
        budget.take("b", 1)
    assert refused.value.message == (
        "things: 100 of 100 are taken, 0 of them by this client, and 1 more are wanted (max-things)"
    )
    assert refused.value.retry_after == 1.0


def test_what_is_given_back_is_free_and_the_client_forgotten():
    budget = Budget(10, "things", "max-things")
    with budget.taken("a", 4), budget.forced("b", 20):
        assert (budget.num_taken, budget.held_by("b")) == (24, 20)
    assert budget.num_taken == 0
    assert budget._held == {}


def test_unread_bytes_count_until_the_next_ones_are_taken():
    budget = Budget(100 * STEP, "bytes", "max-held-bytes")
    unread = UnreadBytes(budget, "a", 50 * STEP)
    unread.add(STEP - 1)
    assert budget.num_taken == 0
    unread.add(9 * STEP + 1)
    assert budget.num_taken == 10 * STEP
    unread.taken(0)
    assert budget.num_taken == 10 * STEP  # on their way
    unread.add(STEP)
    assert budget.num_taken == 11 * STEP
    unread.taken(0)
    assert budget.num_taken == STEP
    unread.release()
    unread.release()
    assert budget.num_taken == 0


def test_unread_bytes_are_bounded_for_one_answer_and_for_all():
    budget = Budget(80 * STEP, "bytes", "max-held-bytes")
    first, second = UnreadBytes(budget, "a", 50 * STEP), UnreadBytes(budget, "a", 50 * STEP)
    first.add(50 * STEP)
    with pytest.raises(ResourceExhaustedError, match="max-unread-bytes"):
        first.add(STEP)
    with pytest.raises(ResourceExhaustedError, match="max-held-bytes"):
        second.add(40 * STEP)
