"""The spans of sequences, made when one ends: its times are known then, and until then tracing costs nothing.

A sequence is traced if its group says whose part it is: the worker begins no trace of its own. Its longest steps are
events, so that a trace says what a request waited for; a span a step would be thousands.
"""

import time
from collections import deque
from dataclasses import dataclass
from heapq import nlargest
from itertools import takewhile

from common.tracing import Attributes, Span, Tracer, valid_traceparent
from fissile.errors import FissileError
from worker.core.outputs import SequenceOutput
from worker.core.stopping import FinishReason
from worker.engine.steps import FinishedStep

MAX_STEPS = 4096
"""That are remembered: some minutes of large steps, half a minute of small ones."""
MAX_STEP_EVENTS = 8
"""Of a phase."""


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    ended: float
    seconds: float
    num_tokens: int
    num_sequences: int


class SequenceTraces:
    """Does nothing for a `traceparent` that is none."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS)

    def step(self, number: int, step: FinishedStep) -> None:
        """One has just finished."""
        if self._tracer.is_on:
            num_tokens, num_sequences = step.batch.num_tokens, len(step.batch.slots)
            self._steps.append(_Step(number, step.ended_at, step.step_seconds, num_tokens, num_sequences))

    def refused(self, traceparent: str, error: FissileError) -> None:
        if self._is_traced(traceparent):
            self._sequence(traceparent, {}, time.monotonic()).end(*_fault(error))

    def failed(self, traceparent: str, index: int, arrived: float, error: FissileError) -> None:
        """It ends without an output of the engine."""
        if self._is_traced(traceparent):
            self._sequence(traceparent, {"fissile.completion.index": index}, arrived).end(*_fault(error))

    def ended(self, traceparent: str, output: SequenceOutput) -> None:
        """With its terminal output."""
        timings = output.timings
        if not self._is_traced(traceparent) or timings is None or output.finish_reason is None:
            return
        now = time.monotonic()
        about: Attributes = {
            "fissile.completion.index": output.index,
            "gen_ai.response.finish_reasons": [output.finish_reason.value],
            "gen_ai.usage.output_tokens": output.token_offset + len(output.token_ids),
            "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
            "fissile.num_preemptions": timings.num_preemptions,
        }
        sequence = self._sequence(traceparent, about, timings.queued)
        scheduled, first_token = timings.scheduled, timings.first_token
        parent = sequence.traceparent
        self._tracer.span("queue", parent, start=timings.queued).end({}, at=now if scheduled is None else scheduled)
        if scheduled is not None:
            self._phase("prefill", parent, scheduled, now if first_token is None else first_token)
        if first_token is not None:
            self._phase("decode", parent, first_token, now)
        sequence.end({}, "the sequence failed" if output.finish_reason is FinishReason.ERROR else "", at=now)

    def _is_traced(self, traceparent: str) -> bool:
        return bool(traceparent) and self._tracer.is_on and bool(valid_traceparent(traceparent))

    def _sequence(self, traceparent: str, about: Attributes, start: float) -> Span:
        about = {"gen_ai.response.model": self._model, **about}
        return self._tracer.span("sequence", valid_traceparent(traceparent), "server", about, start)

    def _phase(self, name: str, parent: str, start: float, end: float) -> None:
        """With its longest steps in order."""
        later = takewhile(lambda step: step.ended > start, reversed(self._steps))
        steps = [step for step in later if step.ended <= end]
        span = self._tracer.span(name, parent, attributes={"fissile.num_steps": len(steps)}, start=start)
        longest = nlargest(MAX_STEP_EVENTS, steps, key=lambda step: step.seconds)
        for step in sorted(longest, key=lambda step: step.number):
            about = {"number": step.number, "seconds": step.seconds}
            span.event("step", {**about, "tokens": step.num_tokens, "sequences": step.num_sequences}, step.ended)
        span.end({}, at=end)


def _fault(error: FissileError) -> tuple[Attributes, str]:
    """Not its text, which may quote a client."""
    name = error.reason.lower()
    return {"error.type": name}, name
