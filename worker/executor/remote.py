"""Ranks on other hosts: they connect to this one, show that they know the secret, and say which rank they are."""

import threading
from dataclasses import dataclass
from typing import Any

from worker.executor.listener import Listener
from worker.processes.messages import receive
from worker.processes.tcp import TcpConnection
from worker.runner.messages import Join


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRanks:
    """The last `count` ranks of the group are started on other hosts, and join at `host`:`port`."""

    count: int
    host: str
    port: int
    secret: bytes


class RankListener(Listener[Join]):
    """For the ranks of other hosts."""

    def __init__(self, remote: RemoteRanks, world_size: int) -> None:
        """Raises ExecutorStartError when it cannot listen."""
        self._world_size = world_size
        ranks = range(world_size - remote.count, world_size)
        super().__init__(remote.host, remote.port, remote.secret, ranks, "rank")

    def objection(self, join: Join) -> str | None:
        if join.world_size != self._world_size:
            return f"it says that there are {join.world_size} ranks, this worker has {self._world_size}"
        return None


class RemoteRank:
    """A `RankTransport`."""

    def __init__(self, rank: int, listener: RankListener) -> None:
        self._rank, self._listener = rank, listener
        self._connection: TcpConnection | None = None
        self._was_killed = False
        self._lock = threading.Lock()

    def open(self) -> None:
        connection = self._listener.wait_for(self._rank)
        with self._lock:
            self._connection = connection
            if self._was_killed:
                raise ConnectionError("it is not wanted any more")

    def send(self, message: bytes) -> None:
        self._opened().send_bytes(message)

    def receive(self) -> Any:
        return receive(self._opened())

    def wait(self) -> None:
        """Its end cannot be seen from here, only that of its connection."""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def kill(self) -> None:
        """A rank ends when its connection does."""
        with self._lock:
            self._was_killed = True
            if self._connection is not None:
                self._connection.close()
        self._listener.close()

    def is_stopped(self) -> bool:
        """Only its own host could say."""
        return False

    def epitaph(self) -> str:
        if self._connection is None:
            return f"rank {self._rank} did not join"
        return f"rank {self._rank} on {self._connection.peer} is gone; its host has its log"

    def _opened(self) -> TcpConnection:
        if self._connection is None:
            raise ConnectionError(f"rank {self._rank} has not joined")
        return self._connection
