"""Series that come and go with the models and workers that they tell of.

Each is kept at hand: to look one up by its labels takes longer than to count. Labels are bounded: `model` is the id of
a model that a worker serves, never what a client wrote, and empty where a request never came to one; `worker` is an
address, and its series go with the worker.
"""

from collections import defaultdict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter

from common.metrics import ITL_BUCKETS, LENGTH_BUCKETS, REQUEST_BUCKETS, TTFT_BUCKETS, Histogram, Series

PER_WORKER = ("model", "worker")


@dataclass(frozen=True, slots=True)
class OfModel:
    """Of requests for one model."""

    queued: Series
    prompt: Series
    completion: Series
    cached: Counter
    expected_cached: Counter
    moves: Counter


class ModelSeries:
    """Those of all models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"fissile_router_{name}", text, ("model",), buckets, registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"fissile_router_{name}", text, ("model",), registry=registry)

        self._queued = histogram("queued_seconds", "Wait of a request for room on a worker.", REQUEST_BUCKETS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS)
        self._completion = histogram("request_completion_tokens", "Generated tokens of a request.", LENGTH_BUCKETS)
        self._cached = counter("cached_tokens", "Prompt tokens whose KV came from the prefix cache.")
        self._expected_cached = counter(
            "expected_cached_tokens", "Prompt tokens that were expected to come from there."
        )
        self._moves = counter("request_moves", "Times a request moved to another worker.")
        self._by_model: dict[str, OfModel] = {}

    def of(self, model: str) -> OfModel:
        if model not in self._by_model:
            self._by_model[model] = OfModel(
                self._queued.labels(model),
                self._prompt.labels(model),
                self._completion.labels(model),
                self._cached.labels(model),
                self._expected_cached.labels(model),
                self._moves.labels(model),
            )
        return self._by_model[model]

    def keep(self, models: AbstractSet[str]) -> None:
        """Remove those of all others: models may be replaced."""
        for model in self._by_model.keys() - models:
            del self._by_model[model]
            for series in (self._queued, self._prompt, self._completion):
                series.remove(model)
            for counter in (self._cached, self._expected_cached, self._moves):
                counter.remove(model)


@dataclass(frozen=True, slots=True)
class OfHop:
    """Of requests for one model on one worker. Seconds."""

    ttft: Series
    tpot: Series
    itl: Series
    e2e: Series


@dataclass(slots=True)
class _OfWorker:
    hops: dict[str, OfHop] = field(default_factory=dict)
    """By model."""
    ends: dict[tuple[str, str], Counter] = field(default_factory=dict)
    """By model and end."""


class WorkerSeries:
    """Those of all workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"fissile_router_{name}", text, PER_WORKER, buckets, registry)

        self._ttft = histogram("ttft_seconds", "From arrival to the first token.", TTFT_BUCKETS)
        self._tpot = histogram("tpot_seconds", "Mean time per token of a request after its first.", ITL_BUCKETS)
        self._itl = histogram("itl_seconds", "Gap between two messages with tokens.", ITL_BUCKETS)
        self._e2e = histogram("e2e_seconds", "From arrival to the last message.", REQUEST_BUCKETS)
        self._requests = Counter("fissile_router_requests", "Requests by end.", (*PER_WORKER, "end"), registry=registry)
        self._by_worker: defaultdict[str, _OfWorker] = defaultdict(_OfWorker)

    def hop(self, model: str, worker: str) -> OfHop:
        hops = self._by_worker[worker].hops
        if model not in hops:
            families = (self._ttft, self._tpot, self._itl, self._e2e)
            hops[model] = OfHop(*(family.labels(model, worker) for family in families))
        return hops[model]

    def ends(self, model: str, worker: str, end: str) -> Counter:
        """Of requests that ended so."""
        ends = self._by_worker[worker].ends
        if (model, end) not in ends:
            ends[model, end] = self._requests.labels(model, worker, end)
        return ends[model, end]

    def keep(self, workers: AbstractSet[str], models: AbstractSet[str]) -> None:
        """Remove those of all others: names may lead to new addresses every day."""

        def is_gone(model: str, worker: str) -> bool:
            return (worker != "" and worker not in workers) or (model != "" and model not in models)

        for worker, series in list(self._by_worker.items()):
            for model in [model for model in series.hops if is_gone(model, worker)]:
                del series.hops[model]
                for family in (self._ttft, self._tpot, self._itl, self._e2e):
                    family.remove(model, worker)
            for model, end in [key for key in series.ends if is_gone(key[0], worker)]:
                del series.ends[model, end]
                self._requests.remove(model, worker, end)
            if not series.hops and not series.ends:
                del self._by_worker[worker]
