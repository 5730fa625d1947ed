"""The default: the worker that gets to a request's first token soonest, by what is known of its cache and its load.

Costs are in tokens of prefill:

    prompt tokens, less CACHED_WORTH times those that are cached there
    + tokens to be computed there before it
    + KV_SHARE of the tokens that sequences hold in its cache, which every step reads
    + SEQUENCE_TOKENS for each sequence

The least cost wins; chance decides between costs that are nearly the same, so that routers that know the same do not
all run to one. What is cached counts only where it makes no hot spot: not for a worker that has clearly more than its
share of the open sequences, or of the requests sent lately. A prefix that many ask for is thus computed by others, too,
and the load spreads over all that have it.
"""

import random
from collections.abc import Mapping, Sequence

from router.fleet.load import LoadTracker
from router.fleet.policies.policy import C, Choice, Work
from router.fleet.prefixes.prefixes import Prefixes
from router.fleet.session import Session

CACHED_WORTH = 2
"""A token that is computed once more delays this request and those behind it, and takes the place of another one in the
cache."""
KV_SHARE = 0.25
SEQUENCE_TOKENS = 64
NEAR_TOKENS = 32
"""Less than a sequence: an idle worker is always better than one that is not."""

SHARE_FACTOR = 1.25
OPEN_SLACK = 2
SENT_SLACK = 16
"""More than its share is more than SHARE_FACTOR times the mean and so many."""
NO_ROOM_TOKENS = 1 << 32
"""A worker whose cache has no room for the request comes behind all that have."""
NO_PLACE_TOKENS = 1 << 33
"""One that runs as many sequences as it can comes behind those, too: the request would wait for one of them to end,
which takes longer than any prompt. One too many of equal requests, and the whole batch takes a second time."""
MAX_MEAN_SENT = 256
"""Requests per worker, after which those before count half."""


class PrefixAware:
    """Takes O(workers + blocks of the prompt)."""

    def __init__(self, prefixes: Prefixes, rng: random.Random) -> None:
        self._prefixes = prefixes
        self._rng = rng

    def choose(self, work: Work, candidates: Sequence[C]) -> Choice[C]:
        cached = self._prefixes.cached_tokens(work, candidates) if work.reads_cache else {}
        counted = _without_hot_spots(cached, candidates) if cached else cached
        costs = [
            _cost(c.load, work.num_tokens, cached.get(c.session, 0), counted.get(c.session, 0))
            if cached
            else _cost(c.load, work.num_tokens)
            for c in candidates
        ]
        limit = min(costs) + NEAR_TOKENS
        chosen = self._rng.choice([c for c, cost in zip(candidates, costs, strict=True) if cost <= limit])
        num_cached = cached.get(chosen.session, 0)
        self._prefixes.sent(work, chosen.session, num_cached)
        return Choice(chosen, num_cached)


def _cost(load: LoadTracker, num_tokens: int, num_cached: int = 0, num_counted: int = 0) -> float:
    """`num_counted`: of the cached ones, that count."""
    num_prefill_tokens = load.num_prefill_tokens + num_tokens
    cost = num_prefill_tokens + KV_SHARE * load.num_kv_tokens + SEQUENCE_TOKENS * load.num_sequences
    cost -= CACHED_WORTH * num_counted
    if num_prefill_tokens - num_cached > load.num_free_tokens:
        cost += NO_ROOM_TOKENS
    return cost if load.has_place else cost + NO_PLACE_TOKENS


def _without_hot_spots(cached: Mapping[Session, int], candidates: Sequence[C]) -> dict[Session, int]:
    loads = [c.load for c in candidates]
    mean_sent = sum(load.num_sent for load in loads) / len(loads)
    if mean_sent > MAX_MEAN_SENT:
        for load in loads:
            load.num_sent /= 2
        mean_sent /= 2
    max_sent = SHARE_FACTOR * mean_sent + SENT_SLACK
    max_open = SHARE_FACTOR * sum(load.num_sequences for load in loads) / len(loads) + OPEN_SLACK
    return {
        c.session: cached[c.session]
        for c in candidates
        if c.session in cached and c.load.num_sent <= max_sent and c.load.num_sequences <= max_open
    }
