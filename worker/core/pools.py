"""What a model keeps in the cache, declared as data: the planner and the block manager never know what is in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class PoolKind(Enum):
    PAGE = "page"
    """The pool of KV blocks; an entry is one block of all layers that share the table."""
    STATE = "state"
    """Groups of consecutive slots, one group a request."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One need of a model. Several PAGE specs share block ids: a block is an entry of each of them."""

    kind: PoolKind
    bytes_per_entry: int
    entries_per_request: int = 0
    """STATE only: slots in a group."""
    extra: dict[str, int] = field(default_factory=dict)
    """Facts for logs and planners, such as `tokens_per_entry`."""


class PoolBudgetError(ValueError):
    """Not one block fits. `num_bytes_needed` would do."""

    def __init__(self, num_bytes: int, num_bytes_needed: int) -> None:
        super().__init__(
            f"{num_bytes} bytes do not hold the state of all requests and one block: {num_bytes_needed} do"
        )
        self.num_bytes_needed = num_bytes_needed


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Counts for `CacheConfig`, and what they take."""

    num_blocks: int
    num_groups: int
    num_page_bytes: int
    num_state_bytes: int


def plan_pools(specs: Sequence[PoolSpec], num_bytes: int, max_num_seqs: int) -> PoolPlan:
    """Turns what a model needs and a byte budget into counts. Pure.

    State comes first, a group for each sequence that may run; blocks get the rest. Raises `PoolBudgetError` if not one
    block fits. A model without PAGE specs gets no blocks.
    """
    states = [spec for spec in specs if spec.kind is PoolKind.STATE]
    bytes_per_block = sum(spec.bytes_per_entry for spec in specs if spec.kind is PoolKind.PAGE)
    bytes_per_group = sum(spec.bytes_per_entry * spec.entries_per_request for spec in states)
    num_groups = max_num_seqs if states else 0
    num_state_bytes = num_groups * bytes_per_group
    num_rest = num_bytes - num_state_bytes
    if num_rest < bytes_per_block:
        raise PoolBudgetError(num_bytes, num_state_bytes + bytes_per_block)
    num_blocks = num_rest // bytes_per_block if bytes_per_block else 0
    return PoolPlan(num_blocks, num_groups, num_blocks * bytes_per_block, num_state_bytes)
