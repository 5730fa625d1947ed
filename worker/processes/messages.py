"""Messages between processes of ours: pickled, one object a message."""

import pickle
from typing import Any, Protocol

PICKLE_PROTOCOL = 5


class Sender(Protocol):
    """One end of a pipe, or of a connection between hosts. One thread at a time."""

    def send_bytes(self, buf: bytes, /) -> None:
        """Raises OSError when the other side is gone."""


class Receiver(Protocol):
    """The other end. One thread at a time."""

    def recv_bytes(self) -> bytes:
        """Blocks. Raises EOFError or OSError when the other side is gone."""


def send(connection: Sender, message: Any) -> None:
    connection.send_bytes(encode(message))


def encode(message: Any) -> bytes:
    """For sending the same message to several processes."""
    return pickle.dumps(message, PICKLE_PROTOCOL)


def receive(connection: Receiver) -> Any:
    """Blocks. Raises EOFError or OSError when the other side is gone. Only for a peer that has shown who it is: who
    chooses what is unpickled chooses what is run."""
    return pickle.loads(connection.recv_bytes())
