"""What this router counts: Prometheus metrics and the answer to GetStats, fed by the same calls."""

import time
from collections import Counter as Tally
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from common.metrics import LENGTH_BUCKETS, REQUEST_BUCKETS, TOKEN_BUCKETS, TTFT_BUCKETS
from router.latency import LatencyWindows, Stopwatch

Gauges = Callable[[], dict[str, tuple[str, float]]]
"""Name to (help, value), asked at scrape time."""


class _GaugeCollector(Collector):
    """Reads the router's state when asked, in place of a gauge that must be kept in step with it."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> list[GaugeMetricFamily]:
        return [GaugeMetricFamily(name, text, value=value) for name, (text, value) in self._gauges().items()]


class RouterMetrics:
    """One per router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._started = time.monotonic()
        self.latency = LatencyWindows()
        self.finished: Tally[str] = Tally()
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"fissile_router_{name}", text, buckets=buckets, registry=registry)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS)
        self._tpot = histogram("time_per_output_token_seconds", "Mean of a request after its first.", TOKEN_BUCKETS)
        self._itl = histogram("inter_token_latency_seconds", "Gap between messages with tokens.", TOKEN_BUCKETS)
        self._e2e = histogram("request_seconds", "From arrival to the end.", REQUEST_BUCKETS)
        self._prompt_length = histogram("prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS)
        self._completion_length = histogram("completion_tokens", "Generated tokens of a request.", LENGTH_BUCKETS)
        self._requests = Counter("fissile_router_requests", "Requests by end.", ["end"], registry=registry)
        self._moves = Counter(
            "fissile_router_request_moves", "Times a request moved to another worker.", registry=registry
        )

    @property
    def uptime(self) -> float:
        """Seconds."""
        return time.monotonic() - self._started

    def watch(self, gauges: Gauges) -> None:
        """Add gauges."""
        self._registry.register(_GaugeCollector(gauges))

    def first_token(self, seconds: float, worker: LatencyWindows) -> None:
        self.latency.ttft.observe(seconds)
        worker.ttft.observe(seconds)
        self._ttft.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        self.latency.itl.observe(seconds)
        self._itl.observe(seconds)

    def moved(self) -> None:
        self._moves.inc()

    def completed(self, watch: Stopwatch, tpot: float | None, worker: LatencyWindows | None) -> None:
        """A request got its terminal message."""
        self.latency.e2e.observe(watch.elapsed)
        self._e2e.observe(watch.elapsed)
        if tpot is not None:
            self.latency.tpot.observe(tpot)
            self._tpot.observe(tpot)
            if worker is not None:
                worker.tpot.observe(tpot)

    def ended(self, end: str, num_prompt_tokens: int, num_completion_tokens: int) -> None:
        """A request is closed, however. `end`: finish reason or gRPC status, in lower case."""
        self.finished[end] += 1
        self._requests.labels(end).inc()
        self.num_prompt_tokens += num_prompt_tokens
        self.num_completion_tokens += num_completion_tokens
        self._prompt_length.observe(num_prompt_tokens)
        self._completion_length.observe(num_completion_tokens)
