"""Which worker gets a request: what a policy sees, and what it says.

Who could not serve it is filtered out before: wrong model, tokenizer or rank, not healthy, tried before. A policy
scores the others and picks one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from common.block_hash import extend_chain
from router.fleet.load import LoadTracker
from router.fleet.session import Session

HASHES_AT_ONCE = 32


class Candidate(Protocol):
    """What a policy may look at of a worker."""

    @property
    def address(self) -> str: ...

    @property
    def session(self) -> Session: ...

    @property
    def load(self) -> LoadTracker: ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Work:
    """What a policy may look at of a request."""

    token_ids: Sequence[int]
    """The prompt."""
    cache_salt: bytes = b""
    routing_key: str = ""
    num_generated: int = 0
    """Tokens that other workers have made of it already, of all completions."""
    reads_cache: bool = True
    """False: all of the prompt is computed, whatever is cached, as log probabilities of it are asked for."""
    _hashes: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """To be computed before the next one comes, where nothing is cached."""
        return len(self.token_ids) + self.num_generated

    def block_hashes(self, block_size: int, num_blocks: int) -> Iterator[int]:
        """Of the prompt's first blocks, under its salt. Most prompts share little with others, so no more are made than
        are taken."""
        hashes = self._hashes.setdefault(block_size, [])
        for start in range(0, num_blocks, HASHES_AT_ONCE):
            end = min(start + HASHES_AT_ONCE, num_blocks)
            if len(hashes) < end:
                extend_chain(hashes, self.token_ids, block_size, self.cache_salt, end)
            yield from hashes[start:end]


@dataclass(frozen=True, slots=True)
class Choice(Generic[C]):
    worker: C
    num_cached_tokens: int = 0
    """Of the prompt, that the policy takes to be in its cache."""


class Policy(Protocol):
    """Choosing counts nothing into the load: the caller does, at once."""

    def choose(self, work: Work, candidates: Sequence[C]) -> Choice[C]:
        """`candidates`: never none."""
        ...
