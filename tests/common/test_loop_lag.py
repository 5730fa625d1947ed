"""An event loop that is held up is measured, and what held it up is named."""

import asyncio
import logging
import selectors
import time

from common.loop_lag import LoopLag

TICK = 0.01
LONG = 0.05


def hold_up(seconds):
    time.sleep(seconds)


def lags(seconds, caplog, *, times=1):
    """All that was observed around `times` long callbacks, and the warnings."""

    async def scenario():
        seen = []
        lag = LoopLag(seen.append, TICK, LONG)
        lag.start()
        for _ in range(times):
            await asyncio.sleep(3 * TICK)
            hold_up(seconds)
            await asyncio.sleep(3 * TICK)
        lag.stop()
        num_seen = len(seen)
        await asyncio.sleep(3 * TICK)
        assert len(seen) == num_seen, "it has stopped"
        return seen

    with caplog.at_level(logging.WARNING, logger="common.loop_lag"):
        seen = asyncio.run(scenario())
    return seen, [record.getMessage() for record in caplog.records if record.name == "common.loop_lag"]


def test_what_holds_the_loop_up_is_named(caplog):
    seen, warnings = lags(4 * LONG, caplog)
    assert max(seen) >= 3 * LONG
    (warning,) = warnings
    assert warning.startswith("the event loop was held up for 0.")
    assert "it was in hold_up (test_loop_lag.py:15), called by scenario (test_loop_lag.py:" in warning


def test_one_warning_for_many(caplog):
    """A loop that has too much to do is late all the time; the metric has all of it, and what a busy machine adds."""
    seen, warnings = lags(3 * LONG, caplog, times=3)
    assert sum(lag >= LONG for lag in seen) >= 3
    assert len(warnings) == 1


def test_a_loop_that_was_not_woken_is_no_culprit(caplog, monkeypatch):
    """As on a machine that is too busy; here the select itself is late."""

    class Late(selectors.SelectSelector):
        def select(self, timeout=None):
            return super().select(None if timeout is None else timeout + 4 * LONG)

    monkeypatch.setattr(asyncio.selector_events.selectors, "DefaultSelector", Late)
    _, warnings = lags(0, caplog)
    assert warnings and "it waited for its turn on a processor" in warnings[0]


def test_stopped_before_it_was_started():
    async def scenario():
        LoopLag(print).stop()

    asyncio.run(scenario())
