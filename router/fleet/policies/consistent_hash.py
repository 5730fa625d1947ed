"""The same worker for the same key, as long as its load allows: rendezvous hashing with bounded load.

Every worker has a score for every key, and the highest takes the request. A worker that comes or goes changes nothing
between the others, and routers that know nothing of each other agree.
"""

from collections.abc import Sequence

import xxhash

from common.block_hash import pack_tokens
from router.fleet.policies.policy import C, Choice, Policy, Work

LOAD_FACTOR = 1.25
LOAD_SLACK = 4
"""A worker takes nothing by its key that has this many sequences more than LOAD_FACTOR times the mean."""
NUM_KEY_TOKENS = 256
"""A request without a key goes by so many first tokens."""


class ConsistentHash:
    """By `routing_key`, or else by the salt and the beginning of the prompt."""

    def choose(self, work: Work, candidates: Sequence[C]) -> Choice[C]:
        mean = sum(c.load.num_sequences for c in candidates) / len(candidates)
        limit = LOAD_FACTOR * mean + LOAD_SLACK
        key = _key(work)
        return Choice(max((c for c in candidates if c.load.num_sequences <= limit), key=lambda c: _score(key, c)))


class KeyFirst:
    """Any policy for requests without a `routing_key`; those that have one go by it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._by_key = ConsistentHash()

    def choose(self, work: Work, candidates: Sequence[C]) -> Choice[C]:
        return (self._by_key if work.routing_key else self._policy).choose(work, candidates)


def _key(work: Work) -> bytes:
    if work.routing_key:
        return work.routing_key.encode()
    return pack_tokens(work.token_ids[:NUM_KEY_TOKENS]) + work.cache_salt


def _score(key: bytes, candidate: C) -> int:
    """The worker's for this key; equal ones do not happen."""
    return xxhash.xxh64_intdigest(candidate.address.encode(), xxhash.xxh64_intdigest(key))
