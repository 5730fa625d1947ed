"""Quantiles over a window, and one request's stopwatch, on a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fissile.v1 import LatencyQuantiles
from router.distribution import RELATIVE_ERROR
from router.latency import LatencyWindow, Stopwatch


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def nearest_rank(values, percent):
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


@given(values=st.lists(st.floats(2e-6, 1e4), min_size=1, max_size=300))
def test_quantiles_are_observed_values_to_one_percent(values):
    window = LatencyWindow(Clock())
    for value in values:
        window.observe(value)
    q = window.quantiles()
    for percent, found in ((50, q.p50), (90, q.p90), (95, q.p95), (99, q.p99)):
        assert found == pytest.approx(nearest_rank(values, percent), rel=RELATIVE_ERROR)
    assert (q.count, q.max) == (len(values), max(values))
    assert q.mean == pytest.approx(sum(values) / len(values))


def test_one_observation_is_every_quantile():
    window = LatencyWindow(Clock())
    window.observe(0.25)
    assert window.quantiles() == LatencyQuantiles(count=1, mean=0.25, p50=0.25, p90=0.25, p95=0.25, p99=0.25, max=0.25)


def test_nothing_observed():
    assert LatencyWindow(Clock()).quantiles() == LatencyQuantiles()


def test_only_the_window_counts():
    clock = Clock()
    window = LatencyWindow(clock)
    window.observe(1)
    clock.now += 10
    window.observe(2)
    assert window.quantiles(5).max == 2
    assert window.quantiles(5).count == 1
    assert window.quantiles(10).count == 2


@pytest.mark.parametrize(("seconds", "values"), [(60, [3]), (120, [2, 3]), (3600, [2, 3])])
def test_beyond_a_minute_it_counts_by_minutes(seconds, values):
    """For the first observation the hour is over, for the second a minute."""
    clock = Clock()
    window = LatencyWindow(clock)
    for value, pause in ((1, 3590), (2, 95), (3, 0)):
        window.observe(value)
        clock.now += pause
    q = window.quantiles(seconds)
    assert (q.count, q.max, q.mean) == (len(values), 3, sum(values) / len(values))


def test_a_burst_that_is_over_leaves_nothing_behind():
    clock = Clock()
    window = LatencyWindow(clock)
    for second in range(7200):
        clock.now += 1
        window.observe(0.001 * (second % 100 + 1))
    assert window.quantiles().count in range(3600, 3662)
    clock.now += 3700
    assert window.quantiles() == LatencyQuantiles()
    assert not window._in_minutes and not window._minutes and not window._seconds


def test_memory_does_not_grow_with_traffic():
    """What is kept is a number for each bucket that was met, a second or a minute."""
    clock = Clock()
    window = LatencyWindow(clock)
    for value in range(1, 20_001):
        window.observe(value / 1e4)
        clock.now += 0.01
    assert len(window._seconds) <= 61 and len(window._minutes) <= 4
    assert len(window._in_minutes) < 500


def test_stopwatch():
    clock = Clock()
    watch = Stopwatch(clock)
    assert (watch.ttft, watch.tpot(1)) == (None, None)
    assert watch.tokens_came(102.0) is None
    assert watch.tokens_came(102.0) is None  # another completion, same message
    assert watch.tokens_came(103.0) == 1.0
    assert watch.tokens_came(105.0) == 2.0
    clock.now = 106.0
    assert (watch.ttft, watch.max_gap, watch.elapsed) == (2.0, 2.0, 6.0)
    assert watch.tpot(4) == pytest.approx(1.0)
    assert watch.tpot(1) is None
