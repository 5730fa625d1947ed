"""Messages give way while the event loop is busy, by clocks of the test's own."""

import pytest

from router.answering.headroom import LEAST, MAX_BUSY, Headroom


class Loop:
    """Has used so much of the processor by now."""

    def __init__(self):
        self.now = self.used = 0.0
        self.headroom = Headroom(lambda: self.now, lambda: self.used)

    def run(self, seconds, busy):
        """Returns the share after it."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self.used += busy * 0.05
            self.headroom.share()
        return self.headroom.share()


def test_a_loop_with_time_left_lets_all_messages_go():
    assert Loop().run(60, MAX_BUSY - 0.01) == 1.0


def test_a_busy_loop_sends_less_and_never_nothing():
    loop = Loop()
    shares = [loop.run(1, 1.0) for _ in range(20)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == LEAST


def test_it_recovers_when_there_is_time_again():
    loop = Loop()
    loop.run(60, 1.0)
    assert loop.run(60, 0.1) == 1.0


def test_a_step_that_makes_it_busy_for_a_moment_changes_nothing():
    loop = Loop()
    shares = [share for _ in range(100) for share in (loop.run(0.1, 1.0), loop.run(0.4, 0.1))]
    assert min(shares) == 1.0


def test_asking_often_is_asking_once():
    often, seldom = Loop(), Loop()
    for loop in (often, seldom):
        loop.now, loop.used = 0.2, 0.2
    assert [often.headroom.share() for _ in range(100)] == [seldom.headroom.share()] * 100


@pytest.mark.parametrize("busy", [0.9, 1.0])
def test_a_loop_that_obeys_settles_where_it_should(busy):
    """It is busy with messages alone, as far as they are let go."""
    loop = Loop()
    for _ in range(2000):
        share = loop.run(0.1, busy * loop.headroom.share())
    assert share * busy == pytest.approx(MAX_BUSY, rel=0.12)
