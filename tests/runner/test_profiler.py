"""What a rank records: spans of steps, up to so many of them, as JSON."""

import json
import queue
from pathlib import Path

import pytest
import torch

from worker.runner import profiler as module
from worker.runner.profiler import NOTHING, StepProfiler


def run_steps(profiler: StepProfiler, count: int) -> None:
    for number in range(count):
        with profiler.step(number, 3), profiler.span("run"):
            torch.ones(2).tanh()


def stop(profiler: StepProfiler) -> str | None:
    written: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    profiler.stop(written.put)
    return written.get(timeout=60)


def names_in(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_recording_ends_by_itself_after_so_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STEPS", 2)
    profiler = StepProfiler(torch.device("cpu"))
    profiler.start(str(tmp_path / "new" / "trace.json"))
    run_steps(profiler, 5)
    assert profiler.span("run") is NOTHING
    assert stop(profiler) is None
    names = names_in(tmp_path / "new" / "trace.json")
    assert [name for name in names if name.startswith("step")] == ["step 0, 3 rows", "step 1, 3 rows"]
    assert names.count("run") == names.count("aten::tanh") == 2


def test_nothing_is_recorded_and_stopping_is_no_fault_without_a_start(tmp_path: Path) -> None:
    profiler = StepProfiler(torch.device("cpu"))
    assert profiler.step(0, 1) is NOTHING
    assert stop(profiler) is None


def test_a_trace_that_cannot_be_written_is_told_and_the_next_one_is_written(tmp_path: Path) -> None:
    profiler = StepProfiler(torch.device("cpu"))
    profiler.start("/dev/null/trace.json")
    run_steps(profiler, 1)
    error = stop(profiler)
    assert error is not None and error.startswith("/dev/null/trace.json: ")
    profiler.start(str(tmp_path / "trace.json"))
    run_steps(profiler, 1)
    assert stop(profiler) is None
    assert "step 0, 3 rows" in names_in(tmp_path / "trace.json")
