"""Prometheus metrics of both services: bucket borders in one place, and the `/metrics` endpoint."""

import logging
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from common.version import package_version

logger = logging.getLogger(__name__)

SCRAPE_SECONDS = 10.0
"""That a scrape's connection may be silent."""

# Seconds. Small models on fast devices answer within a millisecond, and step several times in one.
TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Series:
    """A histogram of one set of labels."""

    __slots__ = ("_borders", "counts", "sum")

    def __init__(self, borders: Sequence[float]) -> None:
        self._borders = borders
        self.counts = [0] * (len(borders) + 1)
        """By bucket, the last one without an end."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._borders, value)] += 1
        self.sum += value


class Histogram(Collector):
    """prometheus_client's, for values that come from one thread: a router observes each message of each stream, and
    that takes a sixth of the time without a lock and a walk through the buckets."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._borders = tuple(map(float, buckets))
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """Made at the first call; in the order of the names."""
        assert len(values) == len(self._labels)
        return self._series.setdefault(values, Series(self._borders))

    def remove(self, *values: str) -> None:
        del self._series[values]

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """From the thread that answers a scrape."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        ends = [*map(str, self._borders), "+Inf"]
        for values, series in list(self._series.items()):
            family.add_metric(values, list(zip(ends, accumulate(series.counts.copy()), strict=True)), series.sum)
        yield family


def new_registry() -> CollectorRegistry:
    """A registry of its own, with process metrics: two services in one process (tests) must not share counters. A
    counter is one series: the client would add another for each, of when it began."""
    disable_created_metrics()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def build_info(registry: CollectorRegistry) -> None:
    """Add `fissile_build_info`, whose labels say what runs."""
    info = Info("fissile_build", "What runs: the version of fissile and of Python.", registry=registry)
    info.info({"version": package_version(), "python_version": platform.python_version()})


def loop_lag(service: str, registry: CollectorRegistry) -> Series:
    """Add how late a service's event loop is."""
    text = "How late the event loop is; all that the service answers waits as long."
    return Histogram(f"fissile_{service}_event_loop_lag_seconds", text, (), LAG_BUCKETS, registry).labels()


class _Scrape(WSGIRequestHandler):
    """A connection, in a thread of its own; prometheus_client keeps a silent one, and its thread, for ever."""

    timeout = SCRAPE_SECONDS

    def handle(self) -> None:
        try:
            super().handle()
        except OSError as error:
            logger.info("a scrape of %s broke off: %s", self.client_address[0], error)

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None]:
    """Serve `/metrics` from a thread; returns the function that stops it. Raises OSError if the port is taken."""
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
        server.RequestHandlerClass = _Scrape
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
    logger.info("metrics on http://%s:%d/metrics", host, server.server_address[1])

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2)

    return stop
