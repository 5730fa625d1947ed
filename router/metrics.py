"""What this router counts: Prometheus metrics and the answer to GetStats, fed by the same calls."""

import time
from collections import Counter as Tally
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from common.metrics import build_info, loop_lag
from router.gauges import GaugeCollector, Gauges
from router.latency import LatencyWindows, Stopwatch
from router.series import ModelSeries, OfHop, WorkerSeries


@dataclass(frozen=True, slots=True)
class HopMetrics:
    """Latencies of requests of one model on one worker."""

    all: LatencyWindows
    """Of the router."""
    own: LatencyWindows
    """Of its requests on this worker."""
    series: OfHop

    def first_token(self, seconds: float) -> None:
        self.series.ttft.observe(seconds)
        self.all.ttft.observe(seconds)
        self.own.ttft.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        self.series.itl.observe(seconds)
        self.all.itl.observe(seconds)

    def completed(self, watch: Stopwatch, tpot: float | None) -> None:
        """A request got its terminal message."""
        self.series.e2e.observe(watch.elapsed)
        self.all.e2e.observe(watch.elapsed)
        if tpot is not None:
            self.series.tpot.observe(tpot)
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


class RouterMetrics:
    """One per router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._started = time.monotonic()
        self.latency = LatencyWindows()
        self.finished: Tally[str] = Tally()
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        build_info(registry)
        self.loop_lag = loop_lag("router", registry)
        self._models = ModelSeries(registry)
        self._workers = WorkerSeries(registry)
        self._kv_restarts = Counter(
            "fissile_router_kv_restarts",
            "Times what is known of a worker's cache began anew while the worker stayed.",
            registry=registry,
        )
        self._full_connections = Counter(
            "fissile_router_full_connections",
            "Times a gRPC connection had all the calls open that it may.",
            registry=registry,
        )

    @property
    def uptime(self) -> float:
        """Seconds."""
        return time.monotonic() - self._started

    def watch(self, gauges: Callable[[], Gauges]) -> None:
        """Add gauges."""
        self.registry.register(GaugeCollector(gauges))

    def hop(self, model: str, worker: str, windows: LatencyWindows) -> HopMetrics:
        """`windows`: of the requests on this worker."""
        return HopMetrics(self.latency, windows, self._workers.hop(model, worker))

    def kv_restarted(self) -> None:
        self._kv_restarts.inc()

    def connection_became_full(self) -> None:
        self._full_connections.inc()

    def queued(self, model: str, seconds: float) -> None:
        """A request goes to its first worker, after so long."""
        self._models.of(model).queued.observe(seconds)

    def moved(self, model: str) -> None:
        self._models.of(model).moves.inc()

    def ended(self, totals: RequestTotals) -> None:
        self.finished[totals.end] += 1
        self._workers.ends(totals.model, totals.worker, totals.end).inc()
        self.num_prompt_tokens += totals.num_prompt_tokens
        self.num_completion_tokens += totals.num_completion_tokens
        if totals.worker:
            self._add_lengths(totals)

    def _add_lengths(self, totals: RequestTotals) -> None:
        series = self._models.of(totals.model)
        series.prompt.observe(totals.num_prompt_tokens)
        series.completion.observe(totals.num_completion_tokens)
        if totals.num_cached_tokens:
            series.cached.inc(totals.num_cached_tokens)
        if totals.num_expected_cached_tokens:
            series.expected_cached.inc(totals.num_expected_cached_tokens)

    def keep(self, workers: AbstractSet[str], models: AbstractSet[str]) -> None:
        """Remove the series of all others."""
        self._workers.keep(workers, models)
        self._models.keep(models)
