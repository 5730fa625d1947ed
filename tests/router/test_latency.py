"""Quantiles over a window, and one request's stopwatch, on a clock that the test moves."""

import pytest

from fissile.v1 import LatencyQuantiles
from router.latency import LatencyWindow, Stopwatch


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_quantiles_are_observed_values():
    window = LatencyWindow(Clock())
    for value in range(1, 101):
        window.observe(value)
    q = window.quantiles()
    assert (q.count, q.mean, q.p50, q.p90, q.p95, q.p99, q.max) == (100, 50.5, 50, 90, 95, 99, 100)


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


def test_memory_is_bounded_and_the_oldest_go():
    window = LatencyWindow(Clock(), max_samples=4)
    for value in range(1, 11):
        window.observe(value)
    q = window.quantiles()
    assert (q.count, q.mean) == (4, 8.5)


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
