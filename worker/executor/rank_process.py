"""The process of a rank on this host, and the pipes to it."""

import os
import subprocess
from multiprocessing.connection import Pipe
from typing import IO, Self

from worker.processes.spawn import spawn


class RankProcess:
    """Runs from the beginning, and imports what every rank needs, which takes seconds, before it is told its `Place`.
    It dies with the thread that starts it (PR_SET_PDEATHSIG). As a context manager it is killed at the end."""

    def __init__(self, inherited: tuple[int, ...] = ()) -> None:
        """`inherited`: file descriptors that it has, too; they stay the caller's."""
        request_end, self.requests = Pipe(duplex=False)
        self.replies, reply_end = Pipe(duplex=False)
        with request_end, reply_end:
            arguments = (request_end.fileno(), reply_end.fileno(), os.getpid())
            self.popen = spawn("worker.runner.process", arguments, subprocess.PIPE, (*arguments[:2], *inherited))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with self.popen:  # waits for its end, and closes its stderr
            self.popen.kill()

    def take_stderr(self) -> IO[str]:
        """What it writes there, which is the caller's from now on. Once."""
        stderr, self.popen.stderr = self.popen.stderr, None
        assert stderr is not None
        return stderr
