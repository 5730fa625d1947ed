"""What this worker counts, for Prometheus. Nothing counts before `start`: the warm-up is nobody's request."""

import time
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from common.metrics import ITL_BUCKETS, REQUEST_BUCKETS, Histogram, Series, build_info, loop_lag
from fissile.errors import FissileError
from worker.core.outputs import LoadSnapshot, SequenceOutput
from worker.engine.steps import FinishedStep
from worker.runner.config import ModelInfo

GAP_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class WorkerMetrics:
    """One per worker. `model` is the id of what it serves, a label of everything."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model
        self._has_started = False

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Series:
            return Histogram(f"fissile_worker_{name}", text, ["model"], buckets, registry).labels(model)

        build_info(registry)
        self.loop_lag = loop_lag("worker", registry)
        self._queued = histogram("queued_seconds", "From arrival to first scheduled.", REQUEST_BUCKETS)
        self._prefill = histogram("prefill_seconds", "From first scheduled to first token.", REQUEST_BUCKETS)
        self._decode = histogram("decode_seconds", "From first token to the end.", REQUEST_BUCKETS)
        self._step = histogram("step_seconds", "Time between results of the device.", ITL_BUCKETS)
        self._gap = histogram("step_gap_seconds", "The part of it in which the device did not run it.", GAP_BUCKETS)
        self._step_tokens = histogram("step_tokens", "Tokens computed in a step.", BATCH_BUCKETS)
        self._step_sequences = histogram("step_sequences", "Sequences in a step.", BATCH_BUCKETS)
        self._ends = Counter("fissile_worker_sequences", "Sequences by end.", ["model", "end"], registry=registry)

    def start(self, info: ModelInfo, load: Callable[[], LoadSnapshot]) -> None:
        """Count from here on, and add gauges and counters of the load, asked at scrape time."""
        device = Info("fissile_worker", "What the worker runs, and on what.", ["model"], registry=self._registry)
        device.labels(self._model).info(
            {"architecture": info.config.architecture, "dtype": info.dtype, "device": info.device}
        )
        memory = Gauge(
            "fissile_worker_memory_bytes", "Memory of rank 0 by use.", ["model", "use"], registry=self._registry
        )
        report = info.memory
        for use, num_bytes in (
            ("weights", report.weights),
            ("activations", report.activations),
            ("kv_cache", report.kv_cache),
            ("state", report.state),
            ("swap", report.swap),
        ):
            memory.labels(self._model, use).set(num_bytes)
        self._registry.register(_LoadCollector(self._model, load))
        self._has_started = True

    def observe_step(self, step: FinishedStep) -> None:
        if not self._has_started:
            return
        self._step.observe(step.step_seconds)
        self._gap.observe(step.gap_seconds)
        self._step_tokens.observe(step.batch.num_tokens)
        self._step_sequences.observe(len(step.batch.slots))

    def observe_end(self, output: SequenceOutput) -> None:
        """A terminal output."""
        assert output.finish_reason is not None
        if not self._has_started:
            return
        self._ends.labels(self._model, output.finish_reason.value).inc()
        if output.timings is None:
            return
        phases = output.timings.phases(time.monotonic())
        for histogram, seconds in (
            (self._queued, phases.queued),
            (self._prefill, phases.prefill),
            (self._decode, phases.decode),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def observe_refusal(self, error: FissileError) -> None:
        self._ends.labels(self._model, f"refused_{error.reason.lower()}").inc()


class _LoadCollector(Collector):
    """Reads the engine's last load when asked, in place of gauges that must be kept in step with it. Counters are those
    since it was made."""

    def __init__(self, model: str, load: Callable[[], LoadSnapshot]) -> None:
        self._model = model
        self._load = load
        before = load()
        self._before, self._accepted_before = _counters(before), before.accepted_counts

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        load = self._load()
        gauges = {
            "running_sequences": ("Sequences being computed.", load.num_running),
            "waiting_sequences": ("Sequences waiting for admission.", load.num_waiting),
            "swapped_sequences": ("Sequences swapped out.", load.num_swapped),
            "waiting_tokens": ("Tokens of waiting sequences.", load.num_waiting_tokens),
            "blocks": ("KV cache blocks.", load.num_blocks),
            "used_blocks": ("KV cache blocks held by sequences.", load.num_used_blocks),
            "cached_blocks": ("Free KV cache blocks with reusable content.", load.num_cached_blocks),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"fissile_worker_{name}", text, labels=["model"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (text, value) in _counters(load).items():
            counter = CounterMetricFamily(f"fissile_worker_{name}", text, labels=["model"])
            counter.add_metric([self._model], value - self._before[name][1])
            yield counter
        yield self._accepted(load.accepted_counts)

    def _accepted(self, counts: tuple[int, ...]) -> HistogramMetricFamily:
        """Empty without speculation."""
        histogram = HistogramMetricFamily(
            "fissile_worker_row_accepted_tokens",
            "Drafts of a row that were right, of rows that had some.",
            labels=["model"],
        )
        if counts:
            news = [num - before for num, before in zip(counts, self._accepted_before, strict=True)]
            bounds = [*map(float, range(len(news) - 1)), "+Inf"]
            buckets = [(str(bound), float(num)) for bound, num in zip(bounds, accumulate(news), strict=True)]
            total = sum(accepted * num for accepted, num in enumerate(news))
            histogram.add_metric([self._model], buckets, sum_value=total)
        return histogram


def _counters(load: LoadSnapshot) -> dict[str, tuple[str, int]]:
    return {
        "prefix_queries": ("Prompt tokens looked up in the prefix cache.", load.num_prefix_queries),
        "prefix_hits": ("Of these, found there.", load.num_prefix_hits),
        "preemptions": ("Preemptions.", load.num_preemptions),
        "swaps": ("Preemptions by swap.", load.num_swaps),
        "evictions": ("Cached blocks evicted.", load.num_evictions),
        "steps": ("Engine steps.", load.num_steps),
        "scheduled_tokens": ("Tokens computed.", load.num_scheduled_tokens),
        "generated_tokens": ("Tokens generated.", load.num_generated_tokens),
        "draft_tokens": ("Tokens drafted by speculation.", load.num_draft_tokens),
        "accepted_tokens": ("Of these, accepted.", load.num_accepted_tokens),
    }
