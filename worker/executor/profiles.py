"""Profiles of all ranks at once, on demand."""

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fissile.errors import FailedPreconditionError, InternalError, InvalidArgumentError
from worker.executor.errors import ExecutorDiedError, ExecutorTimeoutError
from worker.executor.link import RankLink
from worker.processes.messages import encode
from worker.runner.messages import ProfileDone, StartProfile, StopProfile

PROFILE_SECONDS = 120.0
"""For all ranks to start, or to write their traces."""


class Profiles:
    """One at a time. All methods may be called from any thread; `start` and `stop` wait for the ranks."""

    def __init__(self) -> None:
        self._ranks: Sequence[RankLink] = ()
        self._is_busy = threading.Lock()
        self._stem: str | None = None
        """What the names of the traces begin with; None while no profile runs."""
        self._number = 0
        """Of what the ranks were told last: an answer that comes too late is of no use."""
        self._answers: queue.SimpleQueue[tuple[int, ProfileDone] | None] = queue.SimpleQueue()

    def attach(self, ranks: Sequence[RankLink]) -> None:
        """Once they can run steps."""
        self._ranks = ranks

    def start(self, folder: str) -> None:
        """Record from now on. `folder` on each rank's host gets its trace; empty: a new temporary one.

        Raises InvalidArgumentError, FailedPreconditionError while a profile runs, InternalError, or ExecutorError.
        """
        with self._alone():
            if self._stem is not None:
                raise FailedPreconditionError("a profile runs already: stop it first")
            stem = str(_prepared(folder) / f"trace-{os.getpid()}-{self._number}")
            try:
                self._tell(lambda number, rank: StartProfile(number, _trace(stem, rank)))
            except InternalError:
                self._tell(lambda number, _: StopProfile(number))
                raise
            self._stem = stem

    def stop(self) -> str:
        """End it; rank 0's trace, beside which those of the others are. Raises as `start`, without a profile, too."""
        with self._alone():
            if self._stem is None:
                raise FailedPreconditionError("no profile runs")
            stem, self._stem = self._stem, None
            self._tell(lambda number, _: StopProfile(number))
            return _trace(stem, 0)

    def settle(self, rank: int, answer: ProfileDone) -> None:
        """What a rank has answered."""
        self._answers.put((rank, answer))

    def fail(self) -> None:
        """A rank has ended."""
        self._answers.put(None)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._is_busy.acquire(blocking=False):
            raise FailedPreconditionError("a profile is being started or stopped")
        try:
            yield
        finally:
            self._is_busy.release()

    def _tell(self, message: Callable[[int, int], StartProfile | StopProfile]) -> None:
        """`message` makes it of its number and the rank it is for. Waits for all; raises InternalError with what they
        complain of."""
        deadline = time.monotonic() + PROFILE_SECONDS
        self._number += 1
        for rank, link in enumerate(self._ranks):
            link.send(encode(message(self._number, rank)))
        answers = [self._answer(deadline) for _ in self._ranks]
        complaints = [f"rank {rank}: {error}" for rank, error in answers if error is not None]
        if complaints:
            raise InternalError("; ".join(complaints))

    def _answer(self, deadline: float) -> tuple[int, str | None]:
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ExecutorTimeoutError("the ranks do not answer in time") from None
            if answer is None:
                raise ExecutorDiedError("a rank has ended")
            rank, done = answer
            if done.number == self._number:
                return rank, done.error


def _trace(stem: str, rank: int) -> str:
    return f"{stem}-rank{rank}.json"


def _prepared(folder: str) -> Path:
    if not folder:
        return Path(tempfile.mkdtemp(prefix="fissile-profile-"))
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError.of("output_dir", f"it cannot be made: {error.strerror}") from error
    except ValueError as error:  # a zero byte
        raise InvalidArgumentError.of("output_dir", f"it is no path: {error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidArgumentError.of("output_dir", "it is not writable")
    return path
