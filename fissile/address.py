"""Addresses of services, as people write them."""

from fissile.errors import InvalidArgumentError

_ROUTER_PORT, _WORKER_PORT = 50051, 50061
_OWN_FORMS = ("dns:", "unix:", "unix-abstract:", "vsock:", "ipv4:", "ipv6:", "xds:")
"""gRPC's names for ways to find a server; what follows is its own business."""


def router_target(address: str) -> str:
    """What gRPC is to connect to: `HOST:PORT`, or `HOST` with the router's default port. Without one, gRPC would take
    443. Raises InvalidArgumentError."""
    return _target(address, _ROUTER_PORT)


def worker_target(address: str) -> str:
    """The same of a worker."""
    return _target(address, _WORKER_PORT)


def _target(address: str, default_port: int) -> str:
    if address.startswith(_OWN_FORMS):
        return address
    if "://" in address:
        raise _wrong(address, "is a URL; wanted is HOST:PORT, with the gRPC port")
    if address.count(":") > 1 and not address.startswith("["):
        return f"[{address}]:{default_port}"
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(default_port)
    if not host:
        raise _wrong(address, "names no host")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _wrong(address, "has no port between 1 and 65535 after its last colon")
    return f"{host}:{port}"


def _wrong(address: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError.of("address", f"{address!r} {description}")
