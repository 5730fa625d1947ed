"""How long parts took."""

import time

from worker.lap_watch import LapWatch, process_seconds


def test_parts_are_told_in_order_and_add_up(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = LapWatch()
    watch.lap("imports", 1.5)
    now = 102.0
    watch.lap("weights")
    now = 102.25
    watch.lap("cache")
    assert str(watch) == "imports 1.5 s, weights 2.0 s, cache 0.2 s"
    assert watch.seconds == 3.75


def test_a_process_is_older_than_this_test():
    before = process_seconds()
    assert 0 < before <= process_seconds()
