"""Who calls: what the router knows of a client, on both fronts alike."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from common.hosts import name_of_host
from fissile.errors import FieldViolation, PermissionDeniedError


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

    @property
    def has_limits(self) -> bool:
        """Something must be counted."""
        return (self.max_open_requests, self.requests_per_minute, self.tokens_per_minute) != (None, None, None)


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class Caller:
    """Equal callers are one client to whoever shares something out."""

    name: str
    """Of its key, or else the host that it calls from."""
    tenant: str = ""
    """Callers of one tenant share cached prefixes; empty: what all share that have none."""
    quota: Quota = NO_QUOTA

    def may_use(self, names: Iterable[str]) -> bool:
        """A model of these names. What it may not use is not there for it."""
        return self.quota.models is None or not self.quota.models.isdisjoint(names)

    def check_priority(self, priority: int) -> None:
        """Raises PermissionDeniedError for one that is more urgent than it may ask for."""
        lowest = self.quota.min_priority
        if lowest is not None and priority < lowest:
            violation = FieldViolation("options.priority", f"must be at least {lowest} with this key, is {priority}")
            raise PermissionDeniedError(f"{violation.field}: {violation.description}", violations=[violation])

    def cache_salt(self, asked: bytes) -> bytes:
        """What keeps its cached prefixes apart: made of its tenant and of what a request asks for. No request can ask
        for what is another tenant's, because none gets a salt of its own wording."""
        if not self.tenant and not asked:
            return b""
        tenant = self.tenant.encode()
        return hashlib.sha256(len(tenant).to_bytes(4, "big") + tenant + asked).digest()


@lru_cache(1024)
def caller_at(host: str) -> Caller:
    """One without a key."""
    return Caller(name_of_host(host))
