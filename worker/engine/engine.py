"""The engine: one thread that schedules steps, has them run, and hands out what came of them.

    commands → schedule → submit → collect → postprocess → report

With asynchronous scheduling, step N+1 is scheduled and submitted while the device runs N, so that the device never
waits for the host. The thread owns the scheduler: everything else reaches it through the inbox, and hears of it through
one report a step. The engine knows neither gRPC nor tensors.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from common.garbage import FullCollections
from fissile.errors import UnavailableError
from worker.core.errors import InvalidSequenceError, QueueFullError
from worker.core.outputs import LoadSnapshot, SequenceOutput
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence
from worker.core.stopping import FinishReason
from worker.engine.inbox import Command, Inbox
from worker.engine.steps import FinishedStep, StepExecutor, Steps

logger = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_CHECK_SECONDS = 1.0
"""Once nothing has happened for this long, the pools are checked and garbage is collected: that delays no request."""
LOAD_SECONDS = 0.02
"""To put the load together takes half as long as the scheduler takes for a step, and steps may be short."""


class EngineExecutor(StepExecutor, Protocol):
    """What the engine needs of an executor. Calls come from the engine thread only."""

    def check(self) -> None:
        """Raises if its processes died while no step was in flight. Does not wait."""


class StepReport(NamedTuple):
    """What happened since the last report. `outputs` and `refused` name sequences by their engine ids."""

    step: int
    outputs: list[SequenceOutput]
    refused: list[tuple[int, InvalidSequenceError | QueueFullError]]
    load: LoadSnapshot
    """After the step, or LOAD_SECONDS before at most, if nothing was urgent since."""
    finished: FinishedStep | None
    """None when no step ran: something was refused or ended without one."""
    is_urgent: bool
    """It has first tokens, endings or refusals."""


class Engine:
    """Create, `start`, then `stop` or wait for `on_failure`. All public methods may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: EngineExecutor,
        *,
        async_depth: int,
        step_timeout: float,
        on_report: Callable[[StepReport], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """The callbacks run on the engine thread and must not block. After `on_failure` no report comes."""
        self._scheduler = scheduler
        self._executor = executor
        self._steps = Steps(scheduler, executor, async_depth=async_depth, step_timeout=step_timeout)
        self._on_report = on_report
        self._on_failure = on_failure
        self._inbox = Inbox()
        self._collections = FullCollections()
        self._refused: list[tuple[int, InvalidSequenceError | QueueFullError]] = []
        self._calls: set[Future[Any]] = set()
        """Posted and not yet run."""
        self._is_stopping = False
        self._step = 0
        self._num_turns = 0
        self._load = scheduler.load()
        self._load_due = 0.0
        """When it is too old, on the monotonic clock."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def step(self) -> int:
        """Number of steps that are done."""
        return self._step

    @property
    def load(self) -> LoadSnapshot:
        """As of the last report."""
        return self._load

    @property
    def turn(self) -> int | None:
        """Of its loop; None while it waits for others, however long that takes. One that does not change is stuck."""
        return None if self._inbox.is_waited_on or self._steps.is_waiting else self._num_turns

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End the thread after the steps in flight. False if that took longer than `timeout` seconds.

        Sequences that are still open get no output any more.
        """
        self._inbox.post(self._set_stopping)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def check_executor(self) -> None:
        """Have the engine look whether its executor lives: it notices by itself only while steps run."""
        self._inbox.post(self._executor.check)

    def add(self, sequences: list[Sequence]) -> None:
        """Queue one sequence, or all members of an n > 1 request. A refusal comes with the next report."""
        self._inbox.post(lambda: self._add(sequences))

    def abort(self, sequence_ids: list[int], detail: str) -> None:
        """End sequences in whatever state they are. Ids that are unknown or have ended are ignored."""
        self._inbox.post(lambda: self._abort(sequence_ids, detail))

    def call(self, function: Callable[[Scheduler], T]) -> "Future[T]":
        """Run `function` on the engine thread between two steps, unless the future is cancelled before.

        Raises UnavailableError, here or in the future, if the engine has ended.
        """
        future: Future[T] = Future()

        def run() -> None:
            self._calls.discard(future)
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._scheduler))
            except Exception as error:
                future.set_exception(error)

        self._calls.add(future)
        if not self._inbox.post(run):
            self._calls.discard(future)
            raise UnavailableError("the engine has stopped")
        return future

    # Everything below runs on the engine thread.

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            self._loop()
        except Exception as error:
            logger.exception("the engine failed in step %d", self._step)
            failure = error
        self._inbox.close()
        for future in list(self._calls):
            if future.set_running_or_notify_cancel():
                future.set_exception(UnavailableError("the engine has stopped"))
        if failure is not None:
            self._on_failure(failure)

    def _loop(self) -> None:
        while self._keep_on():
            self._steps.fill()
            if self._steps.num_in_flight:
                self._finish_step()
            elif not self._report_news():
                self._sleep()
        while self._steps.num_in_flight:
            self._finish_step()

    def _keep_on(self) -> bool:
        """Carry out what was posted; false if the end was among it, before anything could wait for more to come."""
        self._num_turns += 1
        for command in self._inbox.take(0):
            command()
        return not self._is_stopping

    def _finish_step(self) -> None:
        self._collections.run_if_overdue()
        finished = self._steps.finish()
        self._step += 1
        self._report(finished)

    def _report_news(self) -> bool:
        """Report what was refused or ended without a step; whether there was anything."""
        if not self._scheduler.has_urgent_outputs and not self._refused:
            return False
        self._report(None)
        return True

    def _report(self, finished: FinishedStep | None) -> None:
        refused, self._refused = self._refused, []
        is_urgent = bool(refused) or self._scheduler.has_urgent_outputs
        now = finished.ended_at if finished is not None else time.monotonic()
        if is_urgent or now >= self._load_due:
            self._load, self._load_due = self._scheduler.load(), now + LOAD_SECONDS
        outputs = self._scheduler.take_outputs()
        self._on_report(StepReport(self._step, outputs, refused, self._load, finished, is_urgent))

    def _sleep(self) -> None:
        """Until a command comes or the scheduler wants to be asked again."""
        self._load = self._scheduler.load()  # of a step that was not urgent it may be an older one
        wakeup = self._scheduler.next_wakeup()
        if self._scheduler.has_unfinished():
            if wakeup is None:
                raise RuntimeError("sequences wait, nothing runs, and the scheduler schedules nothing")
            commands = self._inbox.take(max(wakeup - time.monotonic(), 0.001))
        else:
            commands = self._inbox.take(IDLE_CHECK_SECONDS) or self._check_at_idle()
        for command in commands:
            command()

    def _check_at_idle(self) -> list[Command]:
        """Looks for leaks, slice by slice, then waits. The first commands end it, wherever it is."""
        for _ in self._scheduler.integrity_slices():
            commands = self._inbox.take(0)
            if commands:
                return commands
        self._collections.run()
        return self._inbox.take(None)

    def _add(self, sequences: list[Sequence]) -> None:
        try:
            if len(sequences) == 1:
                self._scheduler.add(sequences[0])
            else:
                self._scheduler.add_group(sequences)
        except (InvalidSequenceError, QueueFullError) as error:
            self._refused += [(sequence.id, error) for sequence in sequences]

    def _abort(self, sequence_ids: list[int], detail: str) -> None:
        for sequence_id in sequence_ids:
            self._scheduler.abort(sequence_id, FinishReason.ABORTED, detail)

    def _set_stopping(self) -> None:
        self._is_stopping = True
