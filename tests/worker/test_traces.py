"""The spans of a sequence that ends in other ways than with its last token, and which steps are told of."""

import pytest
from opentelemetry.trace import StatusCode

from common.otel import OtelTracer
from tests.fakes.spans import ENDPOINT, Spans, spans_in_memory
from tests.worker.harness import connect, group, quiet, run_all, run_worker, sequence, until
from worker.core.batch import ScheduledBatch
from worker.core.outputs import SequenceOutput, SequenceTimings
from worker.core.stopping import FinishReason
from worker.core.tokens import token_array
from worker.engine.steps import FinishedStep
from worker.traces import MAX_STEPS, SequenceTraces

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def spans(monkeypatch):
    return spans_in_memory(monkeypatch)


def test_each_completion_has_its_spans(spans):
    async def scenario(system):
        await run_all(system, group(2, traceparent=PARENT))

    run_worker(scenario, otlp_traces_endpoint=ENDPOINT)
    sequences = [span for span in spans.all if span.name == "sequence"]
    assert sorted(span.attributes["fissile.completion.index"] for span in sequences) == [0, 1]
    assert {f"{span.parent.span_id:016x}" for span in sequences} == {PARENT[36:52]}
    assert len(spans.all) == 8


@pytest.mark.parametrize("traceparent", ["", "nonsense", PARENT[:-2] + "00"], ids=["none", "broken", "not sampled"])
def test_what_nobody_traces_has_none(spans, traceparent):
    async def scenario(system):
        await run_all(system, sequence(1, traceparent=traceparent))

    run_worker(scenario, otlp_traces_endpoint=ENDPOINT)
    assert not spans.all


def test_a_refused_group_says_why(spans):
    async def scenario(system):
        await run_all(system, sequence(1, prompt=[10**6], traceparent=PARENT))

    run_worker(scenario, otlp_traces_endpoint=ENDPOINT)
    span = spans["sequence"]
    assert span.attributes["error.type"] == "invalid_argument"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "invalid_argument")


def test_a_group_that_the_scheduler_refuses_says_why(spans):
    async def scenario(system):
        await run_all(system, group(3, traceparent=PARENT))

    run_worker(scenario, otlp_traces_endpoint=ENDPOINT, max_num_waiting=2)
    sequences = [span for span in spans.all if span.name == "sequence"]
    assert sorted(span.attributes["fissile.completion.index"] for span in sequences) == [0, 1, 2]
    assert {span.attributes["error.type"] for span in sequences} == {"resource_exhausted"}


def test_both_uses_of_an_id_say_why_they_end(spans):
    async def scenario(system):
        system.executor.open.clear()
        router = connect(system)
        await router.send(sequence(1, traceparent=PARENT), sequence(1, traceparent=PARENT))
        await router.finish(1)
        system.executor.open.set()
        await quiet(system)

    run_worker(scenario, otlp_traces_endpoint=ENDPOINT)
    assert [span.attributes["error.type"] for span in spans.all] == ["already_exists"] * 2


def test_a_sequence_whose_router_is_gone(spans):
    async def scenario(system):
        num_warm_up = system.executor.num_submitted
        system.executor.open.clear()
        router = connect(system)
        await router.send(sequence(1, traceparent=PARENT))
        await until(lambda: system.executor.num_submitted > num_warm_up)
        router.call.cancel()
        await until(lambda: spans.all)
        system.executor.open.set()
        await quiet(system)

    run_worker(scenario, otlp_traces_endpoint=ENDPOINT)
    span = spans["sequence"]
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "cancelled")


def finished_step(ended_at, seconds=0.5):
    return FinishedStep(ScheduledBatch(0, [0], [1], [4], token_array([7]), [True]), seconds, seconds, ended_at)


def test_a_phase_tells_of_its_longest_steps_in_order():
    """Prefill from 10 s to 20 s, decode to now; a step a second."""
    spans = Spans()
    traces = SequenceTraces(OtelTracer(spans.provider("worker")), "llama")
    for number in range(60):
        traces.step(number, finished_step(float(number), seconds=0.5 + (number % 7 == 0)))
    timings = SequenceTimings(9.0, 10.0, 20.0, 0)
    traces.ended(PARENT, SequenceOutput(1, 0, 5, [7], FinishReason.LENGTH, timings=timings))
    prefill, decode = spans["prefill"], spans["decode"]
    assert (prefill.attributes["fissile.num_steps"], decode.attributes["fissile.num_steps"]) == (10, 39)
    long = {number for number in range(60) if number % 7 == 0}
    for span, steps in ((prefill, range(11, 21)), (decode, range(21, 60))):
        told = [event.attributes["number"] for event in span.events]
        assert len(told) == 8 and told == sorted(told)
        assert long & set(steps) <= set(told) <= set(steps)


def test_only_so_many_steps_are_remembered():
    traces = SequenceTraces(OtelTracer(Spans().provider("worker")), "llama")
    for number in range(MAX_STEPS + 5):
        traces.step(number, finished_step(float(number)))
    assert len(traces._steps) == MAX_STEPS
