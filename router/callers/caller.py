"""Who calls: what the router knows of a client, on both fronts alike."""

from dataclasses import dataclass
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Quota:
    """What a caller may have of this router, between all its connections. None: as much as anybody."""

    max_open_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""
    min_priority: int | None = None
    """Lower runs first: a request may ask for this one or a higher number."""
    models: frozenset[str] | None = None
    """Ids and aliases that it may ask for; others are not there for it."""


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class Caller:
    """Equal callers are one client to whoever shares something out."""

    name: str
    """Of its key, or else the host that it calls from."""
    tenant: str = ""
    """Callers of one tenant share cached prefixes; empty: what all share that have none."""
    quota: Quota = NO_QUOTA


def host_of_peer(peer: str) -> str:
    """Of gRPC's name for the other end of a connection (`ipv4:10.0.0.7:4711`, `ipv6:%5B::1%5D:4711`, `unix:`)."""
    family, _, rest = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return family
    return unquote(rest).rpartition(":")[0].strip("[]")
