"""Who joins a worker from elsewhere: they connect, show that they know the secret, and say which of those missing they
are."""

import logging
import queue
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from common.version import package_version
from worker.executor.errors import ExecutorStartError
from worker.processes.messages import receive, send
from worker.processes.tcp import HandshakeError, TcpConnection, accept
from worker.runner.messages import Refused

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 16
"""At a time: more who knock are turned away, so that they take no memory."""


class JoinMessage(Protocol):
    """The first that a peer sends."""

    @property
    def rank(self) -> int: ...

    @property
    def version(self) -> str: ...


JoinT = TypeVar("JoinT", bound=JoinMessage)


def listening_socket(host: str, port: int) -> socket.socket:
    """Raises ExecutorStartError."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise ExecutorStartError(f"cannot listen for ranks at {host}:{port}: {error.strerror}") from error


class Listener(ABC, Generic[JoinT]):
    """Listens until all have joined, or it is closed."""

    def __init__(self, host: str, port: int, secret: bytes, ranks: Iterable[int], name: str) -> None:
        """`ranks` are those that are to join; `name`: what each of them is called, before its number. Raises
        ExecutorStartError when it cannot listen."""
        self._secret, self._name = secret, name
        self._joined: dict[int, queue.SimpleQueue[TcpConnection | None]] = {rank: queue.SimpleQueue() for rank in ranks}
        self._missing = set(self._joined)
        self._lock = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._socket = listening_socket(host, port)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._listen, name=f"{name}s", daemon=True).start()
        logger.info("%ss of elsewhere (%d) are to join at %s:%d", name, len(self._joined), host, self.port)

    @abstractmethod
    def objection(self, join: JoinT) -> str | None:
        """Why one of our version is not let in; None: it may join, if it is missing."""

    def wait_for(self, rank: int, timeout: float | None = None) -> TcpConnection:
        """The caller's own. Raises ConnectionError if it is closed before that rank has joined, TimeoutError."""
        try:
            connection = self._joined[rank].get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None
        if connection is None:
            raise ConnectionError(f"{self._name} {rank} has not joined")
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
            logger.warning("%s is refused as a %s: %s", host, self._name, error)
        except (EOFError, OSError) as error:
            logger.debug("%s did not finish joining: %s", host, error or "it hung up")
        finally:
            self._handshakes.release()

    def _admit(self, connection: TcpConnection) -> None:
        rank = None
        try:
            rank = self._rank_let_in(connection)
        finally:
            if rank is None:
                connection.close()
        if rank is not None:
            logger.info("%s %d joined from %s", self._name, rank, connection.peer)
            if not self._missing:
                self.close()
            self._joined[rank].put(connection)

    def _rank_let_in(self, connection: TcpConnection) -> int | None:
        """None: it was refused, and told why. Raises EOFError or OSError when it hung up before."""
        join: JoinT = receive(connection)
        reason = self._reason_against(join)
        if reason is None:
            return join.rank
        logger.warning("%s %d on %s is refused: %s", self._name, join.rank, connection.peer, reason)
        send(connection, Refused(reason))
        return None

    def _reason_against(self, join: JoinT) -> str | None:
        """None: the rank is one that is missing; from now on it is not."""
        if join.version != package_version():
            return f"it runs version {join.version}, this worker {package_version()}"
        reason = self.objection(join)
        if reason is not None:
            return reason
        with self._lock:
            if join.rank not in self._missing:
                return f"{self._name} {join.rank} is not missing"
            self._missing.remove(join.rank)
        return None
