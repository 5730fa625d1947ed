"""What a model keeps in the cache, declared as data: the planner and the block manager never know what is in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class PoolKind(Enum):
    PAGE = "page"
    """The pool of KV blocks; an entry is one block of all layers that share the table."""
    STATE = "state"
    """Groups of consecutive entries, one group a request."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One need of a model. Several PAGE specs share block ids: a block is an entry of each of them."""

    kind: PoolKind
    bytes_per_entry: int
    entries_per_request: int = 0
    """STATE only: entries in a group."""


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
    """Those of sequences, then those of checkpoints."""
    num_page_bytes: int
    num_state_bytes: int

    @staticmethod
    def of(specs: Sequence[PoolSpec], num_blocks: int, max_num_seqs: int, num_checkpoints: int = 0) -> "PoolPlan":
        """With so many blocks, whatever they take."""
        state = bytes_of(specs, PoolKind.STATE)
        num_groups = max_num_seqs + num_checkpoints if state else 0
        return PoolPlan(num_blocks, num_groups, num_blocks * bytes_of(specs, PoolKind.PAGE), num_groups * state)


def plan_pools(
    specs: Sequence[PoolSpec],
    num_bytes: int,
    max_num_seqs: int,
    max_num_blocks: int | None = None,
    *,
    num_checkpoints: int = 0,
) -> PoolPlan:
    """Turns what a model needs and a byte budget into counts. Pure.

    State comes first, a group for each sequence that may run and for each checkpoint; blocks get the rest, up to
    `max_num_blocks`. Raises `PoolBudgetError` if not one block fits. A model without PAGE specs gets no blocks.
    """
    page, state = bytes_of(specs, PoolKind.PAGE), bytes_of(specs, PoolKind.STATE)
    num_groups = max_num_seqs + num_checkpoints if state else 0
    num_rest = num_bytes - num_groups * state
    if num_rest < page:
        raise PoolBudgetError(num_bytes, num_groups * state + page)
    num_blocks = num_rest // page if page else 0
    if max_num_blocks is not None:
        num_blocks = min(num_blocks, max_num_blocks)
    return PoolPlan.of(specs, num_blocks, max_num_seqs, num_checkpoints)


def bytes_of(specs: Sequence[PoolSpec], kind: PoolKind) -> int:
    """What one block, or the group of one request, takes in all pools of this kind together."""
    return sum(
        spec.bytes_per_entry * (spec.entries_per_request if kind is PoolKind.STATE else 1)
        for spec in specs
        if spec.kind is kind
    )
