"""What a router is in the midst of, as Prometheus metrics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from router.series import PER_WORKER


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


class GaugeCollector(Collector):
    """Reads the router's state when asked, in place of gauges that must be kept in step with it."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        """`gauges` is called by the thread that answers a scrape."""
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
            GaugeMetricFamily(f"fissile_router_worker_{name}", text, labels=PER_WORKER)
            for name, text in (
                ("available", "1: the worker takes new requests."),
                ("ejected", "1: the worker gets few new requests or none, since too many failed there."),
                ("open_requests", "Open requests of this router on it."),
            )
        )
        info = InfoMetricFamily("fissile_router_worker", "Which version of the model it serves.", labels=PER_WORKER)
        for worker in now.workers:
            labels = worker.model, worker.address
            info.add_metric(labels, {"version": worker.version})
            available.add_metric(labels, worker.is_available)
            ejected.add_metric(labels, worker.is_ejected)
            open_requests.add_metric(labels, worker.num_open_requests)
        yield from (info, available, ejected, open_requests)
