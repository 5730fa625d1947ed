"""A rank on this host: a process of ours, spoken to over pipes."""

import subprocess
import sys
import threading
from collections import deque
from multiprocessing.connection import Pipe
from typing import Any

from worker.processes.messages import receive, send
from worker.processes.spawn import is_stopped, spawn
from worker.runner.messages import Place

STDERR_TAIL_LINES = 40


class LocalRank:
    """A `RankTransport`. The process dies with the thread that opens it (PR_SET_PDEATHSIG)."""

    def __init__(self, rank: int, place: Place) -> None:
        """The process inherits `place.store_fd`, which stays the caller's."""
        self._rank, self._place = rank, place
        self._request_end, self._requests = Pipe(duplex=False)
        self._replies, self._reply_end = Pipe(duplex=False)
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self._forwarder = threading.Thread(target=self._forward_stderr, name=f"rank-{rank}-stderr", daemon=True)
        self._process: subprocess.Popen[str] | None = None
        self._was_killed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """None until it is open."""
        return None if self._process is None else self._process.pid

    def open(self) -> None:
        with self._lock, self._request_end, self._reply_end:
            if self._was_killed:
                raise ConnectionError("it is not wanted any more")
            fds = (self._request_end.fileno(), self._reply_end.fileno())
            inherited = () if self._place.store_fd is None else (self._place.store_fd,)
            self._process = spawn("worker.runner.rank", fds, subprocess.PIPE, inherited)
        self._forwarder.start()
        send(self._requests, self._place)

    def send(self, message: bytes) -> None:
        self._requests.send_bytes(message)

    def receive(self) -> Any:
        return receive(self._replies)

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._forwarder.join(1.0)

    def close(self) -> None:
        self._requests.close()
        self._replies.close()

    def kill(self) -> None:
        with self._lock:
            self._was_killed = True
            if self._process is not None:
                self._process.kill()

    def is_stopped(self) -> bool:
        return self._process is not None and is_stopped(self._process.pid)

    def epitaph(self) -> str:
        code = None if self._process is None else self._process.returncode
        how = "was killed by signal" if code is not None and code < 0 else "ended with exit code"
        tail = "".join(self._stderr_tail) or "(nothing)\n"
        return f"rank {self._rank} {how} {abs(code) if code is not None else '?'}\nIts last words:\n{tail}"

    def _forward_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        for line in self._process.stderr:
            self._stderr_tail.append(line)
            sys.stderr.write(line)
