"""Who is at the other end of a connection, to whoever shares something out between hosts."""

import ipaddress
from functools import lru_cache
from urllib.parse import unquote


@lru_cache(1024)
def host_of_peer(peer: str) -> str:
    """Of gRPC's name for the other end of a connection (`ipv4:10.0.0.7:4711`, `ipv6:%5B::1%5D:4711`, `unix:`)."""
    family, _, rest = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return family
    return unquote(rest).rpartition(":")[0].strip("[]")


def name_of_host(host: str) -> str:
    """What a host is called. Of IPv6 that is its network of 64 bits: who has one address of that has all, and would
    else be as many hosts as it likes."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    if address.is_loopback or address.is_link_local:
        return host
    return str(ipaddress.IPv6Network((address.packed, 64), strict=False))
