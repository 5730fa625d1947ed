"""What both services tell Prometheus: its own parser reads it, and docs/operations.md lists all of it."""

import logging
import re
import socket
import struct
import time
import urllib.request
from pathlib import Path

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common import metrics as served
from common.metrics import LENGTH_BUCKETS, TTFT_BUCKETS, Histogram, new_registry
from fissile.errors import InvalidArgumentError
from router.gauges import Gauges, WorkerGauge
from router.latency import LatencyWindows, Stopwatch
from router.metrics import RequestTotals, RouterMetrics
from tests.worker.fake_executor import FakeExecutor
from worker.config import WorkerSettings
from worker.core.batch import ScheduledBatch
from worker.core.scheduler import Scheduler
from worker.core.tokens import token_array
from worker.engine.steps import FinishedStep
from worker.metrics import WorkerMetrics

DOCS = Path(__file__).parents[2] / "docs/operations.md"
WORKERS = [
    WorkerGauge("llama", "", "w:1", True, False, 2),
    WorkerGauge("llama", "canary", "w:2", False, True, 0),
]

STEP = FinishedStep(ScheduledBatch(0, [0], [1], [4], token_array([7]), [True]), 0.001, 0.0009, 7.0)


def router_metrics():
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.watch(lambda: Gauges(2, 1, 1, 1, 4096, 512, WORKERS))
    return registry, metrics


def serve_one(metrics, worker="w:1"):
    hop = metrics.hop("llama", worker, LatencyWindows())
    hop.first_token(0.0012)
    hop.token_gap(0.0002)
    hop.completed(Stopwatch(), 0.0002)
    metrics.queued("llama", 0.0)
    metrics.moved("llama")
    metrics.ended(RequestTotals("eos", "llama", worker, 31, 16, 8))


def idle_load():
    settings = WorkerSettings()
    load = Scheduler(settings.scheduler_config(64), settings.cache_config(64, 0)).load()
    return load._replace(accepted_counts=(0, 0))  # as with speculation


def worker_metrics():
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "llama")
    metrics.start(FakeExecutor().start(), idle_load)
    metrics.observe_step(STEP)
    metrics.observe_refusal(InvalidArgumentError("no"))
    return registry


def families(registry):
    """As Prometheus reads them, by name."""
    parsed = text_string_to_metric_families(generate_latest(registry).decode())
    return {family.name: family for family in parsed if not family.name.endswith("_created")}


def samples(registry, name):
    return {tuple(s.labels.values()): s.value for f in families(registry).values() for s in f.samples if s.name == name}


@pytest.fixture(scope="module")
def everything():
    registry, metrics = router_metrics()
    serve_one(metrics)
    return families(registry) | families(worker_metrics())


def test_the_documentation_lists_every_metric_and_no_other(everything):
    listed = set()
    for name, family in everything.items():
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        # The text format has no type for build information.
        kind = "info" if name.endswith("_info") else family.type
        suffix = "_total" if family.type == "counter" else ""
        listed.add(f"| `{name}{suffix}` | {kind} | {', '.join(labels)} | {family.documentation} |")
    assert set(re.findall(r"^\| `fissile_.*$", DOCS.read_text(), re.MULTILINE)) == listed


def test_names_say_the_unit(everything):
    """Base units, and the nouns of the protos."""
    for name, family in everything.items():
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_tokens", "_sequences")), name
        assert not re.search("_(ms|milliseconds|kib|mib|percent|num)(_|$)", name), name


def test_buckets_tell_milliseconds_apart(everything):
    borders = {
        name: sorted(float(s.labels["le"]) for s in everything[f"fissile_{name}"].samples if "le" in s.labels)
        for name in ("router_ttft_seconds", "router_itl_seconds", "router_tpot_seconds", "worker_step_seconds")
    }
    assert borders["router_ttft_seconds"][0] == 0.001
    assert {borders[name][0] for name in borders if "ttft" not in name} == {0.0001}


@given(values=st.lists(st.floats(0, 1e6) | st.sampled_from([*TTFT_BUCKETS, *LENGTH_BUCKETS]), max_size=20))
@pytest.mark.parametrize("buckets", [TTFT_BUCKETS, LENGTH_BUCKETS])
def test_a_histogram_is_that_of_the_prometheus_client(buckets, values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    series = Histogram("a_seconds", "Text.", ["model"], buckets, ours).labels("m")
    oracle = prometheus_client.Histogram("a_seconds", "Text.", ["model"], buckets=buckets, registry=theirs).labels("m")
    for value in values:
        series.observe(value)
        oracle.observe(value)
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == expected


def test_a_counter_is_one_series():
    registry = new_registry()
    prometheus_client.Counter("fissile_things", "Text.", registry=registry).inc()
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("fissile_things")]
    assert lines == ["fissile_things_total 1.0"]


def test_what_a_request_adds():
    registry, metrics = router_metrics()
    serve_one(metrics)
    metrics.ended(RequestTotals("not_found"))
    assert samples(registry, "fissile_router_requests_total") == {("eos", "llama", "w:1"): 1, ("not_found", "", ""): 1}
    assert samples(registry, "fissile_router_cached_tokens_total") == {("llama",): 16}
    assert samples(registry, "fissile_router_ttft_seconds_count") == {("llama", "w:1"): 1}
    assert samples(registry, "fissile_router_request_prompt_tokens_sum") == {("llama",): 31}
    assert samples(registry, "fissile_router_worker_info") == {("llama", "", "w:1"): 1, ("llama", "canary", "w:2"): 1}
    assert samples(registry, "fissile_router_worker_available") == {("llama", "w:1"): 1, ("llama", "w:2"): 0}
    assert samples(registry, "fissile_router_worker_ejected") == {("llama", "w:1"): 0, ("llama", "w:2"): 1}


def test_series_of_a_worker_go_with_it():
    registry, metrics = router_metrics()
    for worker in ("w:1", "w:2"):
        serve_one(metrics, worker)
    metrics.ended(RequestTotals("not_found"))
    metrics.keep({"w:2"}, {"llama"})
    for name in ("requests_total", "ttft_seconds_count", "e2e_seconds_count"):
        assert {labels[-1] for labels in samples(registry, f"fissile_router_{name}")} - {""} == {"w:2"}
    serve_one(metrics, "w:1")
    assert samples(registry, "fissile_router_ttft_seconds_count") == {("llama", "w:1"): 1, ("llama", "w:2"): 1}
    assert metrics.finished["eos"] == 3


def test_series_of_a_model_go_with_it():
    """At whatever worker, also where it served another model before; refused requests of it, too."""
    registry, metrics = router_metrics()
    serve_one(metrics)
    metrics.ended(RequestTotals("invalid_argument", "llama"))
    metrics.ended(RequestTotals("not_found"))
    metrics.keep({"w:1"}, {"qwen"})
    told = re.findall(r"^fissile_router_\w*\{[^}]*\}", generate_latest(registry).decode(), re.MULTILINE)
    gauges = [line for line in told if "_worker_" in line]
    assert [line for line in told if "llama" in line] == [line for line in gauges if "llama" in line]
    assert samples(registry, "fissile_router_requests_total") == {("not_found", "", ""): 1}
    serve_one(metrics)
    assert samples(registry, "fissile_router_cached_tokens_total") == {("llama",): 16}


def test_a_worker_counts_from_its_start_on():
    """Its warm-up is no request."""
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "llama")
    metrics.observe_step(STEP)
    metrics.start(FakeExecutor().start(), idle_load)
    metrics.observe_step(STEP)
    assert samples(registry, "fissile_worker_step_seconds_count") == {("llama",): 1}


def test_a_client_that_says_nothing_more_loses_its_connection_and_one_that_breaks_off_is_one_line(
    monkeypatch, caplog, capfd
):
    monkeypatch.setattr(served._Scrape, "timeout", 0.1)
    with caplog.at_level(logging.INFO):
        stop = served.serve_metrics(CollectorRegistry(), "127.0.0.1", 0)
        port = int(caplog.messages[-1].rpartition(":")[2].removesuffix("/metrics"))
        with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
            silent.sendall(b"GET /met")
            assert silent.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port)) as reset:
            reset.sendall(b"GET /met")
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        deadline = time.monotonic() + 20
        while len(caplog.messages) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).status == 200
        stop()
    assert [message.partition(" broke off")[0] for message in caplog.messages[1:]] == ["a scrape of 127.0.0.1"] * 2
    assert capfd.readouterr().err == ""
