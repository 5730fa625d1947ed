"""Ports for what others must be told of before it listens."""

import socket
from contextlib import ExitStack


def free_ports(number: int) -> list[int]:
    """Ports of loopback that nothing listens on now; held together while they are chosen, so all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def free_port() -> int:
    return free_ports(1)[0]
