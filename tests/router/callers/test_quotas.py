"""Quotas by an injected clock: what is refused, for how long, and what is given back."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fissile.errors import QuotaExceededError
from router.callers.caller import Caller, Quota
from router.callers.quotas import Quotas


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def quotas(clock):
    return Quotas(clock)


def alice(**quota: int) -> Caller:
    return Caller("alice", quota=Quota(**quota))


def refusal(quotas: Quotas, caller: Caller, num_requests: int = 1) -> tuple[str, float | None] | None:
    """The limit that is used up and seconds to wait; None: it was let in, and is over."""
    try:
        with quotas.opened(caller, num_requests):
            return None
    except QuotaExceededError as error:
        assert error.subject == "key:alice"
        return error.limit, error.retry_after


def tokens_refusal(quotas: Quotas, caller: Caller, num_prompt: int, num_generated: int = 0):
    try:
        with quotas.opened(caller) as tab:
            tab.take_prompt(num_prompt, lambda: num_generated)
            return None
    except QuotaExceededError as error:
        return error.limit, error.retry_after


def test_requests_at_once(quotas):
    caller = alice(max_open_requests=3)
    with quotas.opened(caller, 2):
        assert refusal(quotas, caller, 2) == ("max_open_requests is 3", 1.0)
        assert refusal(quotas, caller, 1) is None
    assert refusal(quotas, caller, 3) is None
    assert refusal(quotas, caller, 4) == ("max_open_requests is 3", 1.0)


def test_a_place_is_free_again_however_its_call_ends(quotas):
    caller = alice(max_open_requests=1)
    with pytest.raises(ZeroDivisionError), quotas.opened(caller):
        raise ZeroDivisionError
    assert refusal(quotas, caller) is None


def test_requests_a_minute(quotas, clock):
    caller = alice(requests_per_minute=6)
    assert [refusal(quotas, caller, 2) for _ in range(3)] == [None, None, None]
    assert refusal(quotas, caller) == ("requests_per_minute is 6", 10.0)
    clock.now += 15
    assert refusal(quotas, caller) is None
    assert refusal(quotas, caller) == ("requests_per_minute is 6", 5.0)
    clock.now += 3600
    assert refusal(quotas, caller, 6) is None, "what nobody used in an hour is one minute's worth"
    assert refusal(quotas, caller) == ("requests_per_minute is 6", 10.0)


def test_tokens_a_minute_are_of_prompt_and_answer(quotas, clock):
    caller = alice(tokens_per_minute=600)
    assert tokens_refusal(quotas, caller, 100, 200) is None
    assert tokens_refusal(quotas, caller, 310) == ("tokens_per_minute is 600", 1.0)
    assert tokens_refusal(quotas, caller, 300) is None
    assert tokens_refusal(quotas, caller, 0) == ("tokens_per_minute is 600", 0.1), "nothing begins on credit"


def test_a_long_answer_is_paid_for_afterwards(quotas, clock):
    caller = alice(tokens_per_minute=600)
    assert tokens_refusal(quotas, caller, 100, 5000) is None
    assert tokens_refusal(quotas, caller, 10) == ("tokens_per_minute is 600", 450.1)
    clock.now += 451
    assert tokens_refusal(quotas, caller, 10) is None


def test_a_prompt_of_more_than_a_minute_needs_all_of_it(quotas, clock):
    caller = alice(tokens_per_minute=600)
    assert tokens_refusal(quotas, caller, 1200) is None
    clock.now += 100
    assert tokens_refusal(quotas, caller, 1200) == ("tokens_per_minute is 600", 20.0)


def test_open_requests_are_counted_as_they_go(quotas, clock):
    """Else many long answers begun together would all be free until the first one ends."""
    caller = alice(tokens_per_minute=600)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(quotas.opened(caller)).take_prompt(0, lambda: 200)
        assert tokens_refusal(quotas, caller, 60) is None, "asked less than a moment ago"
        clock.now += 1
        assert tokens_refusal(quotas, caller, 60) == ("tokens_per_minute is 600", 5.1)
    assert tokens_refusal(quotas, caller, 60) == ("tokens_per_minute is 600", 5.1), "paid once"


def test_who_has_no_tokens_left_is_refused_before_anything_is_done(quotas, clock):
    caller = alice(tokens_per_minute=600, requests_per_minute=2)
    assert tokens_refusal(quotas, caller, 600, 30) is None
    assert [refusal(quotas, caller) for _ in range(3)] == [("tokens_per_minute is 600", 3.1)] * 3
    clock.now += 4
    assert refusal(quotas, caller) is None, "refusals are not requests"


def test_callers_have_quotas_of_their_own_and_most_have_none(quotas):
    caller = alice(requests_per_minute=1)
    assert [refusal(quotas, caller) is None for _ in range(2)] == [True, False]
    assert refusal(quotas, Caller("bob", quota=caller.quota)) is None
    assert [tokens_refusal(quotas, Caller("carol"), 10**9) for _ in range(3)] == [None] * 3


def test_a_quota_that_is_changed_counts_at_once(quotas, clock):
    assert refusal(quotas, alice(requests_per_minute=60), 60) is None
    assert refusal(quotas, alice(requests_per_minute=6)) == ("requests_per_minute is 6", 10.0)
    assert refusal(quotas, alice()) is None


@given(
    per_minute=st.integers(1, 1000),
    calls=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 2000), st.integers(0, 2000)), max_size=60),
)
def test_over_any_time_nobody_gets_more_than_the_rate_and_a_last_answer(per_minute, calls):
    """`calls`: seconds since the one before, tokens of the prompt, of the answer."""
    clock = Clock()
    quotas, caller = Quotas(clock), alice(tokens_per_minute=per_minute)
    begin, used, last = clock.now, 0, 0
    for seconds, num_prompt, num_generated in calls:
        clock.now += seconds
        refused = tokens_refusal(quotas, caller, num_prompt, num_generated)
        if refused is None:
            used, last = used + num_prompt + num_generated, num_prompt + num_generated
        else:
            assert 0 < refused[1] <= (last + per_minute) * 60 / per_minute + 1e-6
        assert used <= per_minute + (clock.now - begin) * per_minute / 60 + last + 1e-6
