"""Ranks on this host: processes of ours, spoken to over pipes."""

import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Self

from worker.executor.listener import listening_socket
from worker.executor.peers import PeerSettings
from worker.executor.rank_process import RankProcess
from worker.executor.remote import RemoteRanks
from worker.processes.messages import receive, send
from worker.processes.spawn import is_stopped
from worker.runner.config import RunnerConfig
from worker.runner.messages import Place

LOOPBACK = "127.0.0.1"
STDERR_TAIL_LINES = 40


class LocalRanks:
    """The ranks of this host, and the socket of the store that all ranks of an executor meet through. It listens before
    any of them runs, so that each can be told its port, and none finds nobody there.

    As a context manager it has their processes run from its beginning, since their imports take longer than all else of
    a start; it is entered in a thread that outlives them, and kills those that are left at its end.
    """

    def __init__(
        self,
        config: RunnerConfig,
        remote: RemoteRanks | None = None,
        peers: PeerSettings | None = None,
        first: RankProcess | None = None,
    ) -> None:
        """`remote` and `peers`: see `Executor`. `first`: a process that runs already, and becomes rank 0, unless that
        holds the store and has to inherit it. Raises ExecutorStartError when it cannot listen."""
        size = config.tensor_parallel_size
        count = size - (remote.count if remote is not None else 0)
        if peers is not None and config.dp_rank == 0:
            host = peers.host
        else:
            host = remote.host if remote is not None else LOOPBACK
        self.store = listening_socket(host, 0)
        """Rank 0 holds the store; among workers, that of data-parallel rank 0. Whoever starts the ranks closes it."""
        self.ranks: list[LocalRank] = []
        for rank in range(count):
            holds_store = rank == config.dp_rank == 0 and size * config.dp_size > 1
            store_fd = self.store.fileno() if holds_store else None
            place = Place(rank, count, self.store.getsockname()[0], store_fd, is_local=True)
            if rank == 0 and first is not None and holds_store:
                first.popen.kill()
            self.ranks.append(LocalRank(rank, place, first if rank == 0 and not holds_store else None))

    def __enter__(self) -> Self:
        for rank in self.ranks:
            rank.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.store.close()
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()


class LocalRank:
    """A `RankTransport`."""

    def __init__(self, rank: int, place: Place, process: RankProcess | None = None) -> None:
        """`process`: its own, if that runs already; one that is started here inherits `place.store_fd`, which stays the
        caller's."""
        self._rank, self._place = rank, place
        self._process = process
        self._is_started = False
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self._forwarder = threading.Thread(target=self._forward_stderr, name=f"rank-{rank}-stderr", daemon=True)
        self._was_killed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """None until it is started."""
        return None if self._process is None else self._process.popen.pid

    def start(self) -> None:
        """Once. Does not wait for the process. Raises ConnectionError after `kill`."""
        self._is_started = True
        with self._lock:
            if self._was_killed:
                raise ConnectionError("it is not wanted any more")
            if self._process is None:
                self._process = RankProcess(() if self._place.store_fd is None else (self._place.store_fd,))
        self._forwarder.start()
        with suppress(OSError):  # it has ended: whoever speaks to it next learns how
            send(self._process.requests, self._place)

    def open(self) -> None:
        if not self._is_started:
            self.start()

    def send(self, message: bytes) -> None:
        assert self._process is not None
        self._process.requests.send_bytes(message)

    def receive(self) -> Any:
        assert self._process is not None
        return receive(self._process.replies)

    def wait(self) -> None:
        if self._process is not None:
            self._process.popen.wait()
            self._forwarder.join(1.0)

    def close(self) -> None:
        if self._process is not None:
            self._process.requests.close()
            self._process.replies.close()

    def kill(self) -> None:
        with self._lock:
            self._was_killed = True
            if self._process is not None:
                self._process.popen.kill()

    def is_stopped(self) -> bool:
        return self._process is not None and is_stopped(self._process.popen.pid)

    def epitaph(self) -> str:
        code = None if self._process is None else self._process.popen.returncode
        how = "was killed by signal" if code is not None and code < 0 else "ended with exit code"
        tail = "".join(self._stderr_tail) or "(nothing)\n"
        return f"rank {self._rank} {how} {abs(code) if code is not None else '?'}\nIts last words:\n{tail}"

    def _forward_stderr(self) -> None:
        assert self._process is not None
        with self._process.take_stderr() as stderr:
            for line in stderr:
                self._stderr_tail.append(line)
                sys.stderr.write(line)
