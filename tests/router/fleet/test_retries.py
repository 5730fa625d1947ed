"""When a request is tried again, and when it has had enough."""

import pytest

from fissile.errors import InternalError, ResourceExhaustedError, UnavailableError
from router.answering.hop import Loss
from router.fleet.retries import MAX_DEATHS, TOKENS_PER_DEATH, Retries
from router.fleet.retry_budget import MAX_SAVED, RetryBudget
from router.fleet.session import Session

DEATH = Loss("worker a lost", worker_died=True)
DRAINED = Loss("aborted by the worker: it is shutting down")


def session(number):
    return Session("a:1", number)


def survives(retries, losses):
    """How many of (loss, tokens) are survived, and the error of the next."""
    for number, (loss, num_tokens) in enumerate(losses):
        try:
            retries.count(session(number), loss, num_tokens)
        except (InternalError, UnavailableError, ResourceExhaustedError) as error:
            return number, error
    return len(losses), None


def test_two_deaths_without_a_token_between_are_the_end():
    num, error = survives(Retries(9, RetryBudget()), [(DEATH, 0), (DEATH, 0)])
    assert (num, type(error)) == (1, InternalError)
    assert error.message == "gave up: 2 workers died while they had this request; the last: worker a lost"


def test_a_token_clears_a_request_and_renews_its_budget():
    retries = Retries(1, RetryBudget())
    assert survives(retries, [(DEATH, 1), (DEATH, 2), (DRAINED, 3), (DEATH, 4)]) == (4, None)
    assert retries.failed == {session(3)}


def test_deaths_stay_rare_by_tokens_made():
    losses = [(DEATH, 1 + number) for number in range(10)]
    num, error = survives(Retries(9, RetryBudget()), losses)
    assert (num, type(error)) == (MAX_DEATHS, InternalError)
    losses = [(DEATH, TOKENS_PER_DEATH * (1 + number)) for number in range(100)]
    assert survives(Retries(9, RetryBudget()), losses) == (100, None)


def test_a_worker_that_leaves_says_nothing_about_a_request():
    num, error = survives(Retries(3, RetryBudget()), [(DRAINED, 0), (DEATH, 0), (DRAINED, 0), (DRAINED, 0)])
    assert (num, type(error)) == (3, UnavailableError)
    assert error.message == f"gave up after 4 workers: {DRAINED.detail}"


@pytest.mark.parametrize("max_retries", [0, 2])
def test_the_last_refusal_is_the_answer(max_retries):
    full = Loss("refused: full", refusal=ResourceExhaustedError("full", retry_after=1.0))
    num, error = survives(Retries(max_retries, RetryBudget()), [(full, 0)] * 4)
    assert (num, error) == (max_retries, full.refusal)


def test_who_moves_again_without_a_token_needs_the_budget_of_all():
    now = [0.0]
    budget = RetryBudget(lambda: now[0])
    for number in range(int(MAX_SAVED)):
        assert survives(Retries(9, budget), [(DRAINED, 0), (DRAINED, 0)]) == (2, None), number
    num, error = survives(Retries(9, budget), [(DRAINED, 0), (DRAINED, 0)])
    assert (num, type(error), error.retry_after) == (1, UnavailableError, 1.0)
    assert error.message == f"gave up after 2 workers, as too many requests are tried again: {DRAINED.detail}"
    assert survives(Retries(9, budget), [(DRAINED, 1), (DRAINED, 2), (DRAINED, 3)]) == (3, None)


def test_the_budget_grows_with_requests_and_a_little_with_time():
    now = [0.0]
    budget = RetryBudget(lambda: now[0])
    while budget.spend():
        pass
    for _ in range(51):
        budget.request_begins()
    assert [budget.spend() for _ in range(11)] == [True] * 10 + [False]
    now[0] = 1.0
    assert [budget.spend() for _ in range(11)] == [True] * 10 + [False]
    now[0] = 1000.0
    assert sum(budget.spend() for _ in range(1000)) == MAX_SAVED
