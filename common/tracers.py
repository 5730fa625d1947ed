"""Which tracer a service has. OpenTelemetry is imported only where traces have somewhere to go."""

from common.tracing import NoTracer, Tracer
from fissile.errors import UnavailableError


def tracer_of(service: str, endpoint: str) -> Tracer:
    """That of a service whose traces go to `endpoint`, if it has one. Raises UnavailableError if what it takes is not
    installed."""
    if not endpoint:
        return NoTracer()
    try:
        from common.otel import otlp_tracer
    except ModuleNotFoundError as error:
        raise UnavailableError(f"otlp-traces-endpoint needs {error.name}: pip install 'fissile[tracing]'") from error
    return otlp_tracer(service, endpoint)
