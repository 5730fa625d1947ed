"""The engine alone, without sockets: races, order, idling."""

import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref

import pytest

from tests.core.builders import make_sequence
from tests.worker.fake_executor import FakeExecutor
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.scheduler import Scheduler
from worker.core.stopping import FinishReason
from worker.engine.engine import Engine


class Listener:
    """Collects reports; `wait` for a condition on what was collected."""

    def __init__(self):
        self.reports, self.failures = [], []
        self._changed = threading.Condition()

    def on_report(self, report):
        with self._changed:
            self.reports.append(report)
            self._changed.notify_all()

    def on_failure(self, error):
        with self._changed:
            self.failures.append(error)
            self._changed.notify_all()

    @property
    def ends(self):
        return [output for report in self.reports for output in report.outputs if output.finish_reason is not None]

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, 60)


def make_engine(async_depth=1, **config):
    executor, listener = FakeExecutor(), Listener()
    settings = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256} | config
    scheduler = Scheduler(
        SchedulerConfig(async_depth=async_depth, **settings), CacheConfig(num_blocks=executor.num_blocks)
    )
    engine = Engine(
        scheduler,
        executor,
        async_depth=async_depth,
        step_timeout=20,
        on_report=listener.on_report,
        on_failure=listener.on_failure,
    )
    engine.start()
    return engine, executor, listener


def wait_until_submitted(executor, num_steps):
    deadline = time.monotonic() + 20
    while executor.num_submitted < num_steps and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("async_depth", [0, 1])
def test_finish_and_abort_in_the_same_tick_end_once(async_depth):
    """Case 17: 1,000 times, the abort arrives while the step with the last token runs."""
    engine, executor, listener = make_engine(async_depth)
    for id in range(1, 1001):
        executor.open.clear()
        engine.add([make_sequence(id, [1, 2, 3], max_tokens=1)])
        engine.abort([id], "race")
        engine.abort([id], "race")
        executor.open.set()
        listener.wait(lambda id=id: len(listener.ends) == id)
    assert [output.sequence_id for output in listener.ends] == list(range(1, 1001))
    assert {output.finish_reason for output in listener.ends} <= {FinishReason.ABORTED, FinishReason.LENGTH}
    load = engine.call(lambda scheduler: scheduler.check_integrity() or scheduler.load()).result(20)
    assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
    assert engine.stop(20) and not listener.failures


@pytest.mark.parametrize(("async_depth", "num_ahead"), [(0, 1), (1, 2)])
def test_the_next_step_is_submitted_while_one_runs_if_so_configured(async_depth, num_ahead):
    engine, executor, listener = make_engine(async_depth)
    executor.open.clear()
    engine.add([make_sequence(1, [1, 2, 3], max_tokens=8)])
    wait_until_submitted(executor, num_ahead)
    time.sleep(0.02)
    assert executor.num_submitted == num_ahead
    executor.open.set()
    listener.wait(lambda: len(listener.ends) == 1)
    # Eight tokens take eight steps, however many are in flight.
    assert executor.num_submitted == 8
    assert engine.stop(20)


def test_a_step_is_one_report():
    engine, executor, listener = make_engine(0)
    executor.open.clear()
    engine.add([make_sequence(1, [1, 2, 3], max_tokens=2)])
    engine.add([make_sequence(2, [1, 2, 4], max_tokens=2)])
    executor.open.set()
    listener.wait(lambda: len(listener.ends) == 2)
    steps = [report.step for report in listener.reports]
    assert steps == sorted(set(steps))
    assert engine.step == steps[-1]
    assert engine.stop(20)


def test_the_load_is_new_with_what_is_urgent_and_at_idle_and_seldom_else(monkeypatch):
    monkeypatch.setattr("worker.engine.engine.LOAD_SECONDS", 3600.0)
    engine, _, listener = make_engine()
    engine.add([make_sequence(1, [1, 2, 3], max_tokens=20)])
    listener.wait(lambda: len(listener.ends) == 1)
    first, *between, last = [report for report in listener.reports if report.outputs]
    assert (first.is_urgent, last.is_urgent) == (True, True)
    assert len(between) == 18 and all(report.load is first.load for report in between)
    assert (first.load.num_generated_tokens, last.load.num_generated_tokens) == (1, 20)
    deadline = time.monotonic() + 20
    while engine.load.num_used_blocks and time.monotonic() < deadline:
        time.sleep(0.001)
    assert engine.load.num_used_blocks == 0
    assert engine.stop(20)


def test_an_idle_engine_notices_a_deadline():
    """It sleeps without polling; the scheduler says when to wake."""
    engine, executor, listener = make_engine()
    executor.open.clear()
    engine.add([make_sequence(1, [1, 2, 3], max_tokens=1, deadline=time.monotonic() + 0.05)])
    time.sleep(0.1)
    executor.open.set()
    listener.wait(lambda: len(listener.ends) == 1)
    assert listener.ends[0].finish_reason in (FinishReason.DEADLINE, FinishReason.LENGTH)
    assert engine.stop(20)


def test_a_leak_found_at_idle_is_a_failure(monkeypatch):
    monkeypatch.setattr("worker.engine.engine.IDLE_CHECK_SECONDS", 0.01)
    engine, _, listener = make_engine()

    def leak(scheduler):
        scheduler._blocks.pool.take(1)

    engine.call(leak).result(20)
    listener.wait(lambda: listener.failures)
    assert isinstance(listener.failures[0], RuntimeError)


def test_a_request_does_not_wait_for_the_check_at_idle(monkeypatch):
    monkeypatch.setattr("worker.engine.engine.IDLE_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(Scheduler, "integrity_slices", lambda _: itertools.repeat(None))
    engine, _, listener = make_engine()
    time.sleep(0.05)
    engine.add([make_sequence(1, [1, 2, 3], max_tokens=1)])
    listener.wait(lambda: listener.ends)
    assert engine.stop(20)


def test_a_call_that_raises_raises_at_the_caller_only():
    engine, _, listener = make_engine()
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda scheduler: 1 // 0).result(20)
    assert engine.call(lambda scheduler: 5).result(20) == 5
    assert engine.stop(20) and not listener.failures


def test_a_call_that_nobody_waits_for_any_more_is_not_run():
    """The RPC behind it was cancelled; the engine goes on."""
    engine, executor, listener = make_engine(0)
    executor.open.clear()
    engine.add([make_sequence(1, [1, 2, 3], max_tokens=1)])
    wait_until_submitted(executor, 1)
    ran = []
    assert engine.call(lambda scheduler: ran.append(1)).cancel()
    executor.open.set()
    listener.wait(lambda: len(listener.ends) == 1)
    assert engine.call(lambda scheduler: ran).result(20) == []
    assert engine.stop(20) and not listener.failures


def test_nothing_is_accepted_after_the_end():
    engine, _, _ = make_engine()
    assert engine.stop(20)
    engine.add([make_sequence(1, [1])])
    engine.abort([1], "")
    with pytest.raises(Exception, match="the engine has stopped"):
        engine.call(lambda scheduler: 5)


def test_a_stop_that_comes_while_a_command_runs_is_heard():
    """It is taken together with nothing else to do: the engine must not go to sleep over it."""
    engine, _, _ = make_engine()
    stopped = []
    stopper = threading.Thread(target=lambda: stopped.append(engine.stop(5)))

    def command(_scheduler):
        stopper.start()
        time.sleep(0.05)

    engine.call(command).result(20)
    stopper.join()
    assert stopped == [True]


@pytest.fixture
def cycle():
    """A reference to garbage that only the collector can free; nothing collects by itself meanwhile."""

    class Node:
        pass

    gc.disable()
    node = Node()
    node.itself = node
    reference = weakref.ref(node)
    del node
    yield reference
    gc.enable()


def test_garbage_is_collected_when_the_engine_is_idle(monkeypatch, cycle):
    monkeypatch.setattr("worker.engine.engine.IDLE_CHECK_SECONDS", 0.01)
    engine, _, _ = make_engine()
    deadline = time.monotonic() + 20
    while cycle() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert engine.stop(20)
    assert cycle() is None


@pytest.mark.parametrize(("max_seconds", "is_collected"), [(0.0, True), (600.0, False)])
def test_garbage_of_a_busy_engine_is_collected_once_in_a_while(monkeypatch, cycle, max_seconds, is_collected):
    monkeypatch.setattr("common.garbage.MAX_SECONDS", max_seconds)
    engine, _, listener = make_engine()
    engine.add([make_sequence(1, [1, 2, 3], max_tokens=3)])
    listener.wait(lambda: listener.ends)
    assert (cycle() is None) is is_collected
    assert engine.stop(20)


def test_what_is_loaded_is_not_walked_through_again():
    program = (
        "import gc; from worker.engine.garbage import leave_to_engine;"
        "loaded = [[] for _ in range(1000)]; leave_to_engine();"
        "print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000, gc.get_threshold()[2] > 10**9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True True True\n"
