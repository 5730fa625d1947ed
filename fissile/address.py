"""Addresses of a router, as people write them."""

from fissile.errors import InvalidArgumentError

DEFAULT_PORT = 50051
_OWN_FORMS = ("dns:", "unix:", "unix-abstract:", "vsock:", "ipv4:", "ipv6:", "xds:")
"""gRPC's names for ways to find a server; what follows is its own business."""


def router_target(address: str) -> str:
    """What gRPC is to connect to: `HOST:PORT`, or `HOST` with the router's default port. Without one, gRPC would take
    443. Raises InvalidArgumentError."""
    if address.startswith(_OWN_FORMS):
        return address
    if "://" in address:
        raise _wrong(address, "is a URL; wanted is HOST:PORT, with the router's gRPC port")
    if address.count(":") > 1 and not address.startswith("["):
        return f"[{address}]:{DEFAULT_PORT}"
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(DEFAULT_PORT)
    if not host:
        raise _wrong(address, "names no host")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _wrong(address, "has no port between 1 and 65535 after its last colon")
    return f"{host}:{port}"


def _wrong(address: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError.of("address", f"{address!r} {description}")
