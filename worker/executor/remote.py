"""Ranks on other hosts: they connect to this one, show that they know the secret, and say which rank they are."""

import logging
import queue
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.version import package_version
from worker.executor.errors import ExecutorStartError
from worker.processes.messages import receive, send
from worker.processes.tcp import HandshakeError, TcpConnection, accept
from worker.runner.messages import Join, Refused

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 16
"""At a time: more who knock are turned away, so that they take no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRanks:
    """The last `count` ranks of the group are started on other hosts, and join at `host`:`port`."""

    count: int
    host: str
    port: int
    secret: bytes


def listening_socket(host: str, port: int) -> socket.socket:
    """Raises ExecutorStartError."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise ExecutorStartError(f"cannot listen for ranks at {host}:{port}: {error.strerror}") from error


class RankListener:
    """Listens until all have joined, or it is closed."""

    def __init__(self, remote: RemoteRanks, world_size: int) -> None:
        """Raises ExecutorStartError when it cannot listen."""
        self._secret, self._world_size = remote.secret, world_size
        self._joined: dict[int, queue.SimpleQueue[TcpConnection | None]] = {
            rank: queue.SimpleQueue() for rank in range(world_size - remote.count, world_size)
        }
        self._missing = set(self._joined)
        self._lock = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._socket = listening_socket(remote.host, remote.port)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()
        logger.info("%d ranks of other hosts are to join at %s:%d", remote.count, remote.host, self.port)

    def wait_for(self, rank: int) -> TcpConnection:
        """The caller's own. Raises ConnectionError if it is closed before that rank has joined."""
        connection = self._joined[rank].get()
        if connection is None:
            raise ConnectionError(f"rank {rank} has not joined")
        return connection

    def close(self) -> None:
        """Nobody joins any more. Idempotent."""
        with self._lock:
            missing, self._missing = self._missing, set()
        for rank in missing:
            self._joined[rank].put(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, (host, *_) = self._socket.accept()
            except OSError:
                return
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(sock, host), name=f"meets-{host}", daemon=True).start()
            else:
                sock.close()

    def _meet(self, sock: socket.socket, host: str) -> None:
        try:
            self._admit(accept(sock, self._secret))
        except HandshakeError as error:
            logger.warning("%s is refused as a rank: %s", host, error)
        except (EOFError, OSError) as error:
            logger.debug("%s did not finish joining: %s", host, error or "it hung up")
        finally:
            self._handshakes.release()

    def _admit(self, connection: TcpConnection) -> None:
        join: Join = receive(connection)
        reason = self._objection(join)
        if reason is not None:
            logger.warning("rank %d on %s is refused: %s", join.rank, connection.peer, reason)
            send(connection, Refused(reason))
            connection.close()
            return
        logger.info("rank %d joined from %s", join.rank, connection.peer)
        if not self._missing:
            self.close()
        self._joined[join.rank].put(connection)

    def _objection(self, join: Join) -> str | None:
        """None: the rank is one that is missing; from now on it is not."""
        if join.version != package_version():
            return f"it runs version {join.version}, this worker {package_version()}"
        if join.world_size != self._world_size:
            return f"it says that there are {join.world_size} ranks, this worker has {self._world_size}"
        with self._lock:
            if join.rank not in self._missing:
                return f"rank {join.rank} is not missing"
            self._missing.remove(join.rank)
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
