"""Whether a port can be listened on: a service asks before it binds one, and who starts services before any of it."""

import errno
import socket
from typing import Any

from fissile.errors import UnavailableError


def check_can_listen(host: str, port: int, purpose: str = "") -> None:
    """Raises UnavailableError with the system's reason, which gRPC only prints, where no address of the host can be
    had, or one is taken: listeners that share a port would share it with another process, too. `purpose` (" for ...")
    says which of several ports it is."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        faults = [fault for family, *_, address in addresses if (fault := _fault_of(family, address))]
    except OSError as error:
        faults, addresses = [error], []
    is_taken = any(fault.errno == errno.EADDRINUSE for fault in faults)
    if is_taken or len(faults) >= len(addresses):
        raise UnavailableError(f"cannot listen on {host}:{port}{purpose}: {faults[0].strerror}") from faults[0]


def _fault_of(family: int, address: tuple[Any, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            # Connections that ended a moment ago are in nobody's way.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            trial.bind(address)
            trial.listen()
    except OSError as error:
        return error
    return None
