"""What this worker counts, for Prometheus."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from common.metrics import REQUEST_BUCKETS, TOKEN_BUCKETS
from fissile.errors import FissileError
from worker.convert_outputs import phase_seconds
from worker.core.outputs import LoadSnapshot, SequenceOutput
from worker.engine import StepStats

GAP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class WorkerMetrics:
    """One per worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"fissile_worker_{name}", text, buckets=buckets, registry=registry)

        self._queued = histogram("queue_seconds", "From arrival to first scheduled.", REQUEST_BUCKETS)
        self._prefill = histogram("prefill_seconds", "From first scheduled to first token.", REQUEST_BUCKETS)
        self._decode = histogram("decode_seconds", "From first token to the end.", REQUEST_BUCKETS)
        self._step = histogram("step_seconds", "Time between results of the device.", TOKEN_BUCKETS)
        self._gap = histogram("step_gap_seconds", "The part of it in which the device did not run it.", GAP_BUCKETS)
        self._step_tokens = histogram("step_tokens", "Tokens computed in a step.", BATCH_BUCKETS)
        self._step_sequences = histogram("step_sequences", "Sequences in a step.", BATCH_BUCKETS)
        self._ends = Counter("fissile_worker_sequences", "Sequences by end.", ["end"], registry=registry)

    def watch(self, load: Callable[[], LoadSnapshot]) -> None:
        """Add gauges and counters of the load, asked at scrape time."""
        self._registry.register(_LoadCollector(load))

    def observe_step(self, stats: StepStats) -> None:
        self._step.observe(stats.step_seconds)
        self._gap.observe(stats.gap_seconds)
        self._step_tokens.observe(stats.num_tokens)
        self._step_sequences.observe(stats.num_sequences)

    def observe_end(self, output: SequenceOutput) -> None:
        """A terminal output."""
        assert output.finish_reason is not None
        self._ends.labels(output.finish_reason.value).inc()
        phases = phase_seconds(output)
        for histogram, seconds in (
            (self._queued, phases.queued),
            (self._prefill, phases.prefill),
            (self._decode, phases.decode),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def observe_refusal(self, error: FissileError) -> None:
        self._ends.labels(f"refused_{error.reason.lower()}").inc()


class _LoadCollector(Collector):
    """Reads the engine's last load when asked, in place of gauges that must be kept in step with it."""

    def __init__(self, load: Callable[[], LoadSnapshot]) -> None:
        self._load = load

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        load = self._load()
        gauges = {
            "sequences_running": ("Sequences being computed.", load.num_running),
            "sequences_waiting": ("Sequences waiting for admission.", load.num_waiting),
            "sequences_swapped": ("Sequences swapped out.", load.num_swapped),
            "waiting_tokens": ("Tokens of waiting sequences.", load.num_waiting_tokens),
            "kv_blocks": ("KV cache blocks.", load.num_blocks),
            "kv_blocks_used": ("KV cache blocks held by sequences.", load.num_blocks_used),
            "kv_blocks_cached": ("Free KV cache blocks with reusable content.", load.num_blocks_cached),
            "kv_occupancy": ("Share of KV cache blocks held by sequences.", load.num_blocks_used / load.num_blocks),
        }
        counters = {
            "prefix_queries": ("Prompt tokens looked up in the prefix cache.", load.num_total_prefix_queries),
            "prefix_hits": ("Prompt tokens found there.", load.num_total_prefix_hits),
            "preemptions": ("Preemptions.", load.num_total_preemptions),
            "swaps": ("Preemptions by swap.", load.num_total_swaps),
            "evictions": ("Cached blocks evicted.", load.num_total_evictions),
            "steps": ("Engine steps.", load.num_total_steps),
            "scheduled_tokens": ("Tokens computed.", load.num_total_scheduled_tokens),
            "generated_tokens": ("Tokens generated.", load.num_total_sampled_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"fissile_worker_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"fissile_worker_{name}", text, value=value)
