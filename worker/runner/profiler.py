"""Records what a rank does, step by step, for viewers of Chrome traces such as Perfetto."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

logger = logging.getLogger(__name__)

MAX_STEPS = 32
"""All that is recorded is in memory, and steps wait while it is taken in: half a second for so many steps of SmolLM2 on
a CPU, 6,500 events each."""
NOTHING = nullcontext()


class StepProfiler:
    """Used by the thread that runs steps: the library records what the thread that starts it calls, and the device."""

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._recording: profile | None = None
        self._path = ""
        self._num_steps = 0
        self._writer: threading.Thread | None = None
        self._error: str | None = None

    def span(self, name: str) -> AbstractContextManager[object]:
        """A named part of a trace; nothing while nobody records."""
        return NOTHING if self._recording is None else record_function(name)

    def step(self, number: int, num_rows: int) -> AbstractContextManager[object]:
        """The whole of a step. Ends the recording before it, if that has enough of them."""
        if self._recording is None:
            return NOTHING
        if self._num_steps == MAX_STEPS:
            self._end()
            return NOTHING
        self._num_steps += 1
        return record_function(f"step {number}, {num_rows} rows")

    def start(self, path: str) -> None:
        """Raises what the library raises. The trace will be at `path`."""
        recording = profile(activities=self._activities)
        recording.start()
        self._recording, self._path, self._num_steps, self._error = recording, path, 0, None

    def stop(self, on_written: Callable[[str | None], None]) -> None:
        """`on_written` gets what went wrong, from another thread, once the trace is there. Does not wait for that."""
        if self._recording is not None:
            self._end()
        writer = self._writer

        def wait() -> None:
            if writer is not None:
                writer.join()
            on_written(self._error)

        threading.Thread(target=wait, name="trace-end", daemon=True).start()

    def _end(self) -> None:
        assert self._recording is not None
        recording, self._recording = self._recording, None
        recording.stop()
        self._writer = threading.Thread(target=self._write, args=(recording,), name="trace", daemon=True)
        self._writer.start()

    def _write(self, recording: profile) -> None:
        try:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            recording.export_chrome_trace(self._path)
            logger.info("trace of %d steps written to %s", self._num_steps, self._path)
        except Exception as error:
            logger.exception("a trace could not be written")
            self._error = f"{self._path}: {error}"
