"""Messages between processes of ours: pickled, one object a message."""

import pickle
from multiprocessing.connection import Connection
from typing import Any

PICKLE_PROTOCOL = 5


def send(connection: Connection, message: Any) -> None:
    connection.send_bytes(encode(message))


def encode(message: Any) -> bytes:
    """For sending the same message to several processes."""
    return pickle.dumps(message, PICKLE_PROTOCOL)


def receive(connection: Connection) -> Any:
    """Blocks. Raises EOFError or OSError when the other side is gone."""
    return pickle.loads(connection.recv_bytes())
