"""A connection to a worker."""

from typing import NamedTuple


class Session(NamedTuple):
    """Names it: what failed on one may work on the next."""

    address: str
    number: int
    lockstep_group: str = ""
    """Of the worker, as it said on this connection."""
