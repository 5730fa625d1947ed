"""Spans of all services of a test, in memory in place of a collector."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import common.otel

ENDPOINT = "http://collector:4317"


class Spans:
    """What has ended so far."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()

    def provider(self, service):
        provider = TracerProvider(resource=common.otel.resource_of(service), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        return provider

    @property
    def all(self):
        return self._exporter.get_finished_spans()

    def __getitem__(self, name):
        (span,) = [span for span in self.all if span.name == name]
        return span

    def parent_of(self, span):
        by_id = {other.context.span_id: other for other in self.all}
        return by_id.get(span.parent.span_id) if span.parent else None

    def tree(self):
        """Names, each with its parent's."""
        parents = {span: self.parent_of(span) for span in self.all}
        return sorted((span.name, parent.name if parent else None) for span, parent in parents.items())


def spans_in_memory(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """What services that are told of ENDPOINT send there from now on."""
    seen = Spans()

    def in_memory(service, endpoint):
        assert endpoint == ENDPOINT
        return common.otel.OtelTracer(seen.provider(service))

    monkeypatch.setattr(common.otel, "otlp_tracer", in_memory)
    return seen
