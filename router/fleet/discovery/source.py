"""Where workers are found: what all ways of it have in common."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker's place."""

    address: str
    """host:port."""
    tls_name: str = ""
    """What its certificate names in place of the address's host; empty: that host."""


class Source(Protocol):
    """One for each target of `--workers`. What it cannot find out now has not changed: that DNS or a file is away says
    nothing about workers."""

    @property
    def known(self) -> frozenset[Endpoint]:
        """Without asking anybody."""
        ...

    def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        """All endpoints, once they are known and whenever they may have changed. Ends when nothing can change. Outages
        are waited for and logged once, not raised."""
        ...
