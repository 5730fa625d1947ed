"""Which version of a model a new request goes to.

First the versions that can take it at all, and of them those that have a worker without failures. Of these by share
where the operator has given some (a canary), otherwise the one whose workers have the least to do: a version with few
workers gets few requests. Equals are drawn by their number of workers. Shares are drawn, too, and give way where only
another version can take a request. Requests with one `routing_key` stay together: the key draws the share, and the
worker that the key leads to decides between versions.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from router.admission.worker_queue import WorkerQueue
from router.fleet.link import WorkerLink
from router.fleet.policies.consistent_hash import ConsistentHash
from router.fleet.policies.policy import Work
from router.fleet.workers import WorkerSet
from router.model.served import ServedModel, ServedVersion, Version

Shares = Mapping[str, Mapping[str, float]]
"""By model and name of the version: of the model's new requests, 0 to 1, together at most 1. Versions that are not
named share the rest."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What of a request decides on its version, as long as its prompt is no tokens yet."""

    dp_rank: int | None = None
    capabilities: frozenset[str] = frozenset()
    routing_key: str = ""


@dataclass(frozen=True, slots=True)
class VersionChoice:
    workers: WorkerSet
    shares: Shares
    queue: WorkerQueue
    """Of requests that wait for room on the workers of a version."""
    random: Random = field(default_factory=Random)
    _on_the_way: Counter[tuple[str, Version]] = field(default_factory=Counter)
    """Requests that no worker knows of yet, by model and version."""

    def in_order(self, model: ServedModel, wish: Wish) -> list[ServedVersion]:
        """The version that a request should go to, and behind it those with a longer context, the longest last; those
        without a worker now are among them if no other is as long. What none can take goes to one that says so."""
        if len(model.versions) == 1 and not model.absent:
            return [*model.versions]
        able, absent = self._able(model.versions, wish), self._able(model.absent, wish)
        candidates = able or absent or model.versions
        candidates = [one for one in candidates if self._admits(one)] or candidates
        chosen = candidates[0] if len(candidates) == 1 else self._chosen(model.id, candidates, wish.routing_key)
        order = [chosen]
        for others in (able, absent):
            length = order[-1].info.max_model_len
            order += sorted((one for one in others if one.info.max_model_len > length), key=_context)
        return order

    def _able(self, versions: Sequence[ServedVersion], wish: Wish) -> Sequence[ServedVersion]:
        able = [one for one in versions if wish.capabilities <= one.version.capabilities]
        return [one for one in able if self._has_rank(one, wish.dp_rank)] or able

    def _admits(self, one: ServedVersion) -> bool:
        return any(link.breaker.admits for link in self._links(one))

    def _chosen(self, model: str, versions: Sequence[ServedVersion], routing_key: str) -> ServedVersion:
        drawn = self._drawn_by_share(model, versions, routing_key)
        return self._by_key(drawn, routing_key) if routing_key else self._least_loaded(drawn)

    @contextmanager
    def counted(self, one: ServedVersion) -> Iterator[None]:
        """While its block lasts, a request that was given this version is prepared for it: to those that come
        meanwhile it is load."""
        key = one.model, one.version
        self._on_the_way[key] += 1
        try:
            yield
        finally:
            self._on_the_way[key] -= 1
            if not self._on_the_way[key]:
                del self._on_the_way[key]

    def _has_rank(self, one: ServedVersion, dp_rank: int | None) -> bool:
        return dp_rank is None or bool(
            self.workers.candidates(one.model, lambda version: version == one.version, dp_rank)
        )

    def _drawn_by_share(
        self, model: str, versions: Sequence[ServedVersion], routing_key: str
    ) -> Sequence[ServedVersion]:
        """Those of one name, or all that no share is given for."""
        shares = self.shares.get(model)
        if not shares:
            return versions
        by_name: dict[str | None, list[ServedVersion]] = {}
        for one in sorted(versions, key=lambda one: one.version.name):  # so that a key leads to the same one each time
            by_name.setdefault(one.version.name if one.version.name in shares else None, []).append(one)
        rest = max(0.0, 1 - sum(shares.values()))
        weights = [rest if name is None else shares[name] for name in by_name]
        # Where only versions with no share at all are left, they get what there is.
        draw = Random(f"{model} {routing_key}") if routing_key else self.random
        return draw.choices(list(by_name.values()), weights if any(weights) else None)[0]

    def _by_key(self, versions: Sequence[ServedVersion], routing_key: str) -> ServedVersion:
        by_worker = {link: one for one in versions for link in self._links(one)}
        if not by_worker:
            return versions[0]
        return by_worker[ConsistentHash().choose(Work((), routing_key=routing_key), list(by_worker)).worker]

    def _least_loaded(self, versions: Sequence[ServedVersion]) -> ServedVersion:
        loads = [self._load(one) for one in versions]
        least = [one for one, load in zip(versions, loads, strict=True) if load == min(loads)]
        return self.random.choices(least, [max(1, one.num_workers) for one in least])[0]

    def _load(self, one: ServedVersion) -> float:
        """Sequences a worker, with those on their way and those that wait for room."""
        links = self._links(one)
        num_sequences = sum(link.load.num_sequences for link in links) + self._on_the_way[one.model, one.version]
        num_waiting = self.queue.num_waiting(line_of(one.model, one.version, None))
        return (num_sequences + num_waiting) / max(1, len(links))

    def _links(self, one: ServedVersion) -> Sequence[WorkerLink]:
        """Its workers that are available."""
        return self.workers.catalogue.available.get(one.model, {}).get(one.version, ())


def line_of(model: str, version: Version, dp_rank: int | None) -> Hashable:
    """In the queue: of the requests that wait for the same workers."""
    return model, version, dp_rank


def _context(one: ServedVersion) -> int:
    return one.info.max_model_len
