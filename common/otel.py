"""Spans through OpenTelemetry's SDK, sent by OTLP over gRPC. The only module that imports it.

All but the endpoint is set by OpenTelemetry's own variables (OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_RESOURCE_ATTRIBUTES and so on), which the SDK reads itself.
"""

import asyncio
import threading
import time
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from common.tracing import Attributes, Kind, Span
from common.version import package_version
from fissile.errors import FissileError

CLOSE_SECONDS = 2.0
"""For the last spans: a collector that is gone must not hold up the end of a service."""

CLOCK_STEP_NS = 10_000
"""What is less between two clocks is how long it takes to read them."""

_KINDS: dict[Kind, SpanKind] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
}


class _WallClock:
    """Spans are on it. The distance to the monotonic clock is taken anew only when it has changed, so that a moment is
    the same for a span and for its child."""

    def __init__(self) -> None:
        self._distance_ns = 0

    def at(self, seconds: float | None) -> int | None:
        """Of the monotonic clock, in nanoseconds; None is now."""
        if seconds is None:
            return None
        distance = time.time_ns() - time.monotonic_ns()
        if abs(distance - self._distance_ns) > CLOCK_STEP_NS:
            self._distance_ns = distance
        return self._distance_ns + int(seconds * 1e9)


class OtelSpan:
    """`common.tracing.Span` has the contract."""

    __slots__ = ("_clock", "_span")

    def __init__(self, span: trace.Span, clock: _WallClock) -> None:
        self._span = span
        self._clock = clock

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def event(self, name: str, attributes: Attributes, at: float | None = None) -> None:
        self._span.add_event(name, attributes, self._clock.at(at))

    def end(self, attributes: Attributes, error: str = "", at: float | None = None) -> None:
        if not self._span.is_recording():  # not sampled, or ended before
            return
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._clock.at(at))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end({}, error=_name_of(error) if error else "")


class OtelTracer:
    """`common.tracing.Tracer` has the contract."""

    is_on = True

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("fissile", package_version())
        self._clock = _WallClock()

    def span(
        self,
        name: str,
        parent: str,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        start: float | None = None,
    ) -> Span:
        # An empty context, never the current one: tasks of other requests run in between.
        context = _context(parent) if parent else Context()
        begun = self._tracer.start_span(name, context, _KINDS[kind], attributes, start_time=self._clock.at(start))
        return OtelSpan(begun, self._clock)

    async def close(self) -> None:
        """In a thread that nobody waits for at the end: the exporter may retry for long."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        deadline = time.monotonic() + CLOSE_SECONDS
        while closing.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def otlp_tracer(service: str, endpoint: str) -> OtelTracer:
    provider = TracerProvider(resource=resource_of(service), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OtelTracer(provider)


def resource_of(service: str) -> Resource:
    """What the environment says of it goes first."""
    ours = Resource.create({"service.version": package_version()})
    return ours.merge(Resource({"service.name": f"fissile-{service}"})).merge(OTELResourceDetector().detect())


def _name_of(error: BaseException) -> str:
    """Not its text, which may quote a client."""
    return error.reason.lower() if isinstance(error, FissileError) else type(error).__name__


def _context(parent: str) -> Context:
    _, trace_id, span_id, flags = parent.split("-")
    remote = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return trace.set_span_in_context(NonRecordingSpan(remote), Context())
