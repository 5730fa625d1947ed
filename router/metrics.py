"""What this router counts: Prometheus metrics and the answer to GetStats, fed by the same calls.

Labels are bounded: `model` is the id of a model that a worker serves, never what a client wrote, and empty where a
request never came to one; `worker` is an address, and its series go with the worker.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from common.metrics import ITL_BUCKETS, LENGTH_BUCKETS, REQUEST_BUCKETS, TTFT_BUCKETS, build_info
from router.latency import LatencyWindows, Stopwatch

_PER_WORKER = ("model", "worker")


@dataclass(frozen=True, slots=True)
class WorkerGauge:
    """A worker as this router sees it now."""

    model: str
    address: str
    is_available: bool
    num_open_requests: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """The router's state, asked at scrape time."""

    num_open_requests: int
    workers: list[WorkerGauge]


@dataclass(frozen=True, slots=True)
class HopMetrics:
    """Latencies of requests of one model on one worker."""

    all: LatencyWindows
    """Of the router."""
    own: LatencyWindows
    """Of its requests on this worker."""
    ttft: Histogram
    tpot: Histogram
    itl: Histogram
    e2e: Histogram

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
    num_completion_tokens: int = 0


@dataclass(slots=True)
class _Known:
    """Series of one worker, to be removed with it."""

    models: set[str] = field(default_factory=set)
    ends: set[tuple[str, str]] = field(default_factory=set)
    """Model and end."""


class RouterMetrics:
    """One per router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._started = time.monotonic()
        self.latency = LatencyWindows()
        self.finished: Tally[str] = Tally()
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self._known: dict[str, _Known] = {}

        def histogram(name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"fissile_router_{name}", text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(f"fissile_router_{name}", text, labels, registry=registry)

        build_info(registry)
        self._ttft = histogram("ttft_seconds", "From arrival to the first token.", _PER_WORKER, TTFT_BUCKETS)
        self._tpot = histogram(
            "tpot_seconds", "Mean time per token of a request after its first.", _PER_WORKER, ITL_BUCKETS
        )
        self._itl = histogram("itl_seconds", "Gap between two messages with tokens.", _PER_WORKER, ITL_BUCKETS)
        self._e2e = histogram("e2e_seconds", "From arrival to the last message.", _PER_WORKER, REQUEST_BUCKETS)
        self._prompt_length = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", ("model",), LENGTH_BUCKETS
        )
        self._completion_length = histogram(
            "request_completion_tokens", "Generated tokens of a request.", ("model",), LENGTH_BUCKETS
        )
        self._cached = counter("cached_tokens", "Prompt tokens whose KV came from the prefix cache.", ("model",))
        self._requests = counter("requests", "Requests by end.", (*_PER_WORKER, "end"))
        self._moves = counter("request_moves", "Times a request moved to another worker.", ("model",))

    @property
    def uptime(self) -> float:
        """Seconds."""
        return time.monotonic() - self._started

    def watch(self, gauges: Callable[[], Gauges]) -> None:
        """Add gauges."""
        self._registry.register(_GaugeCollector(gauges))

    def hop(self, model: str, worker: str, windows: LatencyWindows) -> HopMetrics:
        """`windows`: of the requests on this worker."""
        self._known.setdefault(worker, _Known()).models.add(model)
        ttft, tpot, itl, e2e = (
            metric.labels(model, worker) for metric in (self._ttft, self._tpot, self._itl, self._e2e)
        )
        return HopMetrics(self.latency, windows, ttft, tpot, itl, e2e)

    def moved(self, model: str) -> None:
        self._moves.labels(model).inc()

    def ended(self, totals: RequestTotals) -> None:
        model, worker, end = totals.model, totals.worker, totals.end
        self.finished[end] += 1
        self._known.setdefault(worker, _Known()).ends.add((model, end))
        self._requests.labels(model, worker, end).inc()
        self.num_prompt_tokens += totals.num_prompt_tokens
        self.num_completion_tokens += totals.num_completion_tokens
        if worker:
            self._prompt_length.labels(model).observe(totals.num_prompt_tokens)
            self._completion_length.labels(model).observe(totals.num_completion_tokens)
            self._cached.labels(model).inc(totals.num_cached_tokens)

    def keep_workers(self, workers: AbstractSet[str]) -> None:
        """Remove the series of all others: a name may lead to new addresses every day."""
        for worker in self._known.keys() - workers - {""}:
            known = self._known.pop(worker)
            for model in known.models:
                for metric in (self._ttft, self._tpot, self._itl, self._e2e):
                    metric.remove(model, worker)
            for model, end in known.ends:
                self._requests.remove(model, worker, end)


class _GaugeCollector(Collector):
    """Reads the router's state when asked, in place of gauges that must be kept in step with it."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._gauges()
        yield GaugeMetricFamily("fissile_router_open_requests", "Open requests.", value=now.num_open_requests)
        available = GaugeMetricFamily(
            "fissile_router_worker_available", "1: the worker takes new requests.", labels=_PER_WORKER
        )
        open_requests = GaugeMetricFamily(
            "fissile_router_worker_open_requests", "Open requests of this router on it.", labels=_PER_WORKER
        )
        for worker in now.workers:
            available.add_metric((worker.model, worker.address), worker.is_available)
            open_requests.add_metric((worker.model, worker.address), worker.num_open_requests)
        yield available
        yield open_requests
