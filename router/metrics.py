"""What this router counts: Prometheus metrics and the answer to GetStats, fed by the same calls.

Labels are bounded: `model` is the id of a model that a worker serves, never what a client wrote, and empty where a
request never came to one; `worker` is an address, and its series go with the worker.
"""

import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from common.metrics import (
    ITL_BUCKETS,
    LENGTH_BUCKETS,
    REQUEST_BUCKETS,
    TTFT_BUCKETS,
    Histogram,
    Series,
    build_info,
    loop_lag,
)
from router.latency import LatencyWindows, Stopwatch

_PER_WORKER = ("model", "worker")


@dataclass(frozen=True, slots=True)
class WorkerGauge:
    """A worker as this router sees it now."""

    model: str
    version: str
    """What its operator calls it; may be empty."""
    address: str
    is_available: bool
    is_ejected: bool
    num_open_requests: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """The router's state, asked at scrape time."""

    num_open_requests: int
    num_waiting_requests: int
    num_queued_requests: int
    num_waiting_streams: int
    held_bytes: int
    prefix_index_bytes: int
    workers: list[WorkerGauge]


@dataclass(frozen=True, slots=True)
class HopMetrics:
    """Latencies of requests of one model on one worker."""

    all: LatencyWindows
    """Of the router."""
    own: LatencyWindows
    """Of its requests on this worker."""
    ttft: Series
    tpot: Series
    itl: Series
    e2e: Series

    def first_token(self, seconds: float) -> None:
        self.ttft.observe(seconds)
        self.all.ttft.observe(seconds)
        self.own.ttft.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        self.itl.observe(seconds)
        self.all.itl.observe(seconds)

    def completed(self, watch: Stopwatch, tpot: float | None) -> None:
        """A request got its terminal message."""
        self.e2e.observe(watch.elapsed)
        self.all.e2e.observe(watch.elapsed)
        if tpot is not None:
            self.tpot.observe(tpot)
            self.all.tpot.observe(tpot)
            self.own.tpot.observe(tpot)


@dataclass(slots=True)
class RequestTotals:
    """Of a request that is closed, however."""

    end: str
    """Finish reason or gRPC status, in lower case."""
    model: str = ""
    """Its id; empty: there was none of the name, or the request came to none."""
    worker: str = ""
    """The last one, of the first prompt; empty: it came to none."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_expected_cached_tokens: int = 0
    num_completion_tokens: int = 0


@dataclass(slots=True)
class _Known:
    """Series of one worker, to be removed with it. Kept at hand: to look one up by its labels takes longer than to
    count."""

    hops: dict[str, tuple[Series, Series, Series, Series]] = field(default_factory=dict)
    """By model: ttft, tpot, itl, e2e."""
    ends: dict[tuple[str, str], Counter] = field(default_factory=dict)
    """By model and end."""


@dataclass(frozen=True, slots=True)
class _OfModel:
    """Series of one model."""

    queued: Series
    prompt: Series
    completion: Series
    cached: Counter
    expected_cached: Counter
    moves: Counter

    def add(self, totals: RequestTotals) -> None:
        self.prompt.observe(totals.num_prompt_tokens)
        self.completion.observe(totals.num_completion_tokens)
        if totals.num_cached_tokens:
            self.cached.inc(totals.num_cached_tokens)
        if totals.num_expected_cached_tokens:
            self.expected_cached.inc(totals.num_expected_cached_tokens)


class RouterMetrics:
    """One per router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._started = time.monotonic()
        self.latency = LatencyWindows()
        self.finished: Tally[str] = Tally()
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self._known: defaultdict[str, _Known] = defaultdict(_Known)
        """By worker."""
        self._models: dict[str, _OfModel] = {}
        """By model."""

        def histogram(name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"fissile_router_{name}", text, labels, buckets, registry)

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(f"fissile_router_{name}", text, labels, registry=registry)

        build_info(registry)
        self.loop_lag = loop_lag("router", registry)
        self._ttft = histogram("ttft_seconds", "From arrival to the first token.", _PER_WORKER, TTFT_BUCKETS)
        self._tpot = histogram(
            "tpot_seconds", "Mean time per token of a request after its first.", _PER_WORKER, ITL_BUCKETS
        )
        self._itl = histogram("itl_seconds", "Gap between two messages with tokens.", _PER_WORKER, ITL_BUCKETS)
        self._e2e = histogram("e2e_seconds", "From arrival to the last message.", _PER_WORKER, REQUEST_BUCKETS)
        self._queued = histogram(
            "queued_seconds", "Wait of a request for room on a worker.", ("model",), REQUEST_BUCKETS
        )
        self._prompt_length = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", ("model",), LENGTH_BUCKETS
        )
        self._completion_length = histogram(
            "request_completion_tokens", "Generated tokens of a request.", ("model",), LENGTH_BUCKETS
        )
        self._cached = counter("cached_tokens", "Prompt tokens whose KV came from the prefix cache.", ("model",))
        self._expected_cached = counter(
            "expected_cached_tokens", "Prompt tokens that were expected to come from there.", ("model",)
        )
        self._kv_restarts = counter(
            "kv_restarts", "Times what is known of a worker's cache began anew while the worker stayed.", ()
        )
        self._full_connections = counter(
            "full_connections", "Times a gRPC connection had all the calls open that it may.", ()
        )
        self._requests = counter("requests", "Requests by end.", (*_PER_WORKER, "end"))
        self._moves = counter("request_moves", "Times a request moved to another worker.", ("model",))

    @property
    def uptime(self) -> float:
        """Seconds."""
        return time.monotonic() - self._started

    def watch(self, gauges: Callable[[], Gauges]) -> None:
        """Add gauges."""
        self.registry.register(_GaugeCollector(gauges))

    def hop(self, model: str, worker: str, windows: LatencyWindows) -> HopMetrics:
        """`windows`: of the requests on this worker."""
        hops = self._known[worker].hops
        if model not in hops:
            labels = (model, worker)
            ttft, tpot, itl, e2e = self._ttft, self._tpot, self._itl, self._e2e
            hops[model] = ttft.labels(*labels), tpot.labels(*labels), itl.labels(*labels), e2e.labels(*labels)
        return HopMetrics(self.latency, windows, *hops[model])

    def kv_restarted(self) -> None:
        self._kv_restarts.inc()

    def connection_became_full(self) -> None:
        self._full_connections.inc()

    def queued(self, model: str, seconds: float) -> None:
        """A request goes to its first worker, after so long."""
        self._of_model(model).queued.observe(seconds)

    def moved(self, model: str) -> None:
        self._of_model(model).moves.inc()

    def ended(self, totals: RequestTotals) -> None:
        model, worker, end = totals.model, totals.worker, totals.end
        self.finished[end] += 1
        ends = self._known[worker].ends
        if (model, end) not in ends:
            ends[model, end] = self._requests.labels(model, worker, end)
        ends[model, end].inc()
        self.num_prompt_tokens += totals.num_prompt_tokens
        self.num_completion_tokens += totals.num_completion_tokens
        if worker:
            self._of_model(model).add(totals)

    def _of_model(self, model: str) -> _OfModel:
        if model not in self._models:
            self._models[model] = _OfModel(
                self._queued.labels(model),
                self._prompt_length.labels(model),
                self._completion_length.labels(model),
                self._cached.labels(model),
                self._expected_cached.labels(model),
                self._moves.labels(model),
            )
        return self._models[model]

    def keep(self, workers: AbstractSet[str], models: AbstractSet[str]) -> None:
        """Remove the series of all others: names may lead to new addresses every day, and models be replaced."""

        def is_gone(model: str, worker: str) -> bool:
            return (worker != "" and worker not in workers) or (model != "" and model not in models)

        for worker, known in list(self._known.items()):
            for model in [model for model in known.hops if is_gone(model, worker)]:
                del known.hops[model]
                for metric in (self._ttft, self._tpot, self._itl, self._e2e):
                    metric.remove(model, worker)
            for model, end in [key for key in known.ends if is_gone(key[0], worker)]:
                del known.ends[model, end]
                self._requests.remove(model, worker, end)
            if not known.hops and not known.ends:
                del self._known[worker]
        for model in self._models.keys() - models:
            del self._models[model]
            for series in (self._queued, self._prompt_length, self._completion_length):
                series.remove(model)
            for counter in (self._cached, self._expected_cached, self._moves):
                counter.remove(model)


class _GaugeCollector(Collector):
    """Reads the router's state when asked, in place of gauges that must be kept in step with it."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        now = self._gauges()
        of_router = {
            "open_requests": ("Open requests.", now.num_open_requests),
            "waiting_requests": ("Of these, waiting for their turn to be made ready.", now.num_waiting_requests),
            "queued_requests": ("Of the open ones, waiting for room on a worker.", now.num_queued_requests),
            "waiting_streams": ("Streams with tokens that wait for their turn to be sent.", now.num_waiting_streams),
            "held_bytes": ("Bytes of requests and of answers that are not read yet, by estimate.", now.held_bytes),
            "prefix_index_bytes": ("Bytes of what is known of the workers' caches.", now.prefix_index_bytes),
        }
        for name, (text, value) in of_router.items():
            yield GaugeMetricFamily(f"fissile_router_{name}", text, value=value)
        available, ejected, open_requests = (
            GaugeMetricFamily(f"fissile_router_worker_{name}", text, labels=_PER_WORKER)
            for name, text in (
                ("available", "1: the worker takes new requests."),
                ("ejected", "1: the worker gets few new requests or none, since too many failed there."),
                ("open_requests", "Open requests of this router on it."),
            )
        )
        info = InfoMetricFamily("fissile_router_worker", "Which version of the model it serves.", labels=_PER_WORKER)
        for worker in now.workers:
            labels = worker.model, worker.address
            info.add_metric(labels, {"version": worker.version})
            available.add_metric(labels, worker.is_available)
            ejected.add_metric(labels, worker.is_ejected)
            open_requests.add_metric(labels, worker.num_open_requests)
        yield from (info, available, ejected, open_requests)
