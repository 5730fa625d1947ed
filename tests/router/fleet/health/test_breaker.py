"""The circuit breaker over time, and who is sent to which worker by it."""

from dataclasses import dataclass

import pytest

from router.fleet.health.breaker import (
    MAX_FAILURES_IN_A_ROW,
    MAX_OPEN_SECONDS,
    NUM_TRIALS,
    OPEN_SECONDS,
    WINDOW_SECONDS,
    Breaker,
)
from router.fleet.health.ejection import admitted


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Breaker("a:1", clock)


def fail(breaker, times=1):
    for _ in range(times):
        attempt = breaker.attempt()
        attempt.failed()
        attempt.end()


def succeed(breaker, times=1):
    for _ in range(times):
        attempt = breaker.attempt()
        attempt.succeeded()
        attempt.end()


def opened(clock):
    breaker = Breaker("a:1", clock)
    fail(breaker, MAX_FAILURES_IN_A_ROW)
    return breaker


def test_failures_in_a_row_open_it(breaker):
    fail(breaker, MAX_FAILURES_IN_A_ROW - 1)
    assert breaker.admits
    fail(breaker)
    assert (breaker.admits, breaker.detail) == (False, "none for 2.0 s: 5 requests in a row failed")


def test_a_good_answer_in_between_begins_anew(breaker):
    for _ in range(3):
        fail(breaker, MAX_FAILURES_IN_A_ROW - 1)
        succeed(breaker)
    assert breaker.admits


def test_half_of_many_opens_it_though_none_fail_in_a_row(breaker):
    for _ in range(9):
        fail(breaker)
        succeed(breaker)
    fail(breaker)
    assert breaker.admits, "19 are too few to tell"
    succeed(breaker)
    fail(breaker)
    assert breaker.reason == "11 of 21 requests failed"


def test_failures_of_long_ago_do_not_count(breaker, clock):
    for _ in range(9):
        fail(breaker)
        succeed(breaker)
    clock.now += WINDOW_SECONDS
    for _ in range(4):
        fail(breaker)
        succeed(breaker)
    assert breaker.admits


def test_neither_good_nor_failed_counts_for_nothing(breaker):
    """What is the client's fault, and a worker that is full or drains (sglang#25811, smg#2565)."""
    fail(breaker, MAX_FAILURES_IN_A_ROW - 1)
    for _ in range(100):
        breaker.attempt().end()
    assert breaker.admits
    fail(breaker)
    assert not breaker.admits


def test_open_is_dispatched_to_by_nobody_until_its_time(clock):
    """sglang#31206."""
    breaker = opened(clock)
    clock.now += OPEN_SECONDS - 0.1
    assert not breaker.admits
    clock.now += 0.1
    assert (breaker.admits, breaker.detail) == (True, "few requests, on trial: 5 requests in a row failed")


def test_half_open_admits_a_few_at_a_time_and_closes_after_as_many_good_ones(clock):
    breaker = opened(clock)
    clock.now += OPEN_SECONDS
    trials = [breaker.attempt() for _ in range(NUM_TRIALS)]
    assert not breaker.admits
    trials[0].succeeded()
    assert (breaker.admits, breaker.is_closed) == (True, False)
    trials[1].succeeded()
    trials[2].succeeded()
    assert (breaker.is_closed, breaker.detail) == (True, "")


def test_a_bad_request_does_not_close_a_half_open_one_nor_keep_its_place(clock):
    """sglang#39464, #31206: a 400 closed it; without an outcome it stayed half-open for ever."""
    breaker = opened(clock)
    clock.now += OPEN_SECONDS
    for _ in range(10 * NUM_TRIALS):
        assert breaker.admits
        breaker.attempt().end()
    assert not breaker.is_closed


def test_one_failure_on_trial_opens_it_for_twice_as_long_up_to_a_bound(clock):
    breaker = opened(clock)
    lengths = []
    for _ in range(7):
        clock.now = breaker.admits_at
        fail(breaker)
        lengths.append(breaker.admits_at - clock.now)
    assert lengths == [4.0, 8.0, 16.0, 32.0, MAX_OPEN_SECONDS, MAX_OPEN_SECONDS, MAX_OPEN_SECONDS]


def test_a_long_good_time_makes_the_next_one_short_again(clock):
    breaker = opened(clock)
    for pause, expected in ((MAX_OPEN_SECONDS, 2 * OPEN_SECONDS), (MAX_OPEN_SECONDS + 1, OPEN_SECONDS)):
        clock.now = breaker.admits_at
        succeed(breaker, NUM_TRIALS)
        clock.now += pause
        fail(breaker, MAX_FAILURES_IN_A_ROW)
        assert breaker.admits_at - clock.now == expected


def test_what_was_sent_before_it_opened_says_nothing_of_it_now(clock):
    breaker = Breaker("a:1", clock)
    early = [breaker.attempt() for _ in range(2 * NUM_TRIALS)]
    fail(breaker, MAX_FAILURES_IN_A_ROW)
    begin = breaker.admits_at
    for attempt in early[:NUM_TRIALS]:
        attempt.succeeded()
    for attempt in early[NUM_TRIALS:]:
        attempt.failed()
    assert (breaker.is_closed, breaker.admits_at) == (False, begin)


def test_another_process_at_the_address_begins_anew(clock):
    breaker = opened(clock)
    breaker.reset()
    assert (breaker.admits, breaker.detail) == (True, "")


@dataclass(frozen=True)
class Worker:
    name: str
    breaker: Breaker


def names(workers):
    return "".join(worker.name for worker in admitted(workers))


def test_outliers_are_left_out(clock):
    a, b, c = Worker("a", Breaker("a", clock)), Worker("b", opened(clock)), Worker("c", Breaker("c", clock))
    assert names([a, b, c]) == "ac"
    clock.now += OPEN_SECONDS
    assert names([a, b, c]) == "abc", "it is on trial"


def test_half_of_the_fleet_stays_whatever_fails(clock):
    """Those that would come back first."""
    a = Worker("a", opened(clock))
    clock.now += 0.5
    b, c = Worker("b", opened(clock)), Worker("c", opened(clock))
    assert names([c, b, a]) == "ca"
    assert names([b]) == "b"
    assert names([]) == ""
