"""The span that a client's caller is in, told to the router."""

import sys


def trace_metadata() -> list[tuple[str, str]]:
    """Headers of W3C's trace context; none where the process does not trace: it would have imported OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return []
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return list(headers.items())
