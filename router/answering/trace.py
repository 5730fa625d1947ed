"""The spans of one prompt's request, below its call's: how it came to a worker, and each that it was on."""

from common.tracing import Span, Tracer


class RequestTrace:
    """Told by the request where it is."""

    __slots__ = ("_call", "_hop", "_tracer")

    def __init__(self, tracer: Tracer, call: Span) -> None:
        self._tracer = tracer
        self._call = call
        self._hop: Span | None = None

    def queueing(self) -> Span:
        """It waits for room on a worker. The caller ends it."""
        return self._tracer.span("queue", self._call.traceparent)

    def finding_worker(self) -> Span:
        """The caller ends it."""
        return self._tracer.span("find worker", self._call.traceparent)

    def put_on(self, worker: str) -> str:
        """It goes to a worker, which gets this traceparent."""
        self._hop = self._tracer.span("dispatch", self._call.traceparent, "client", {"server.address": worker})
        return self._hop.traceparent

    def left(self) -> None:
        """It is done there. Idempotent."""
        self._end_hop()

    def lost(self, detail: str) -> None:
        """It is not done and will move on, if it can."""
        self._end_hop(error=detail)
        self._call.event("lost by its worker", {"detail": detail})

    def _end_hop(self, error: str = "") -> None:
        hop, self._hop = self._hop, None
        if hop is not None:
            hop.end({}, error)
