"""What a model keeps in the cache, declared as data: the planner and the block manager never know what is in it."""

from dataclasses import dataclass, field
from enum import Enum


class PoolKind(Enum):
    PAGE = "page"
    """The pool of KV blocks; an entry is one block of all layers that share the table."""
    STATE = "state"
    """Groups of consecutive slots, one group a request."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    kind: PoolKind
    bytes_per_entry: int
    entries_per_request: int = 0
    """STATE only: slots in a group."""
    extra: dict[str, int] = field(default_factory=dict)
    """Facts for logs and planners, such as `tokens_per_entry`."""
