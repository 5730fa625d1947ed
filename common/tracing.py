"""Traces of requests, as the services know them: spans with a parent in W3C's `traceparent` form.

What is behind them is one of two: `NoTracer`, which only carries the parent on, or OpenTelemetry (`common.otel`);
`common.tracers` chooses.
"""

import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self

TRACEPARENT = "traceparent"
"""Of gRPC metadata and HTTP headers."""

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-.*)?")

Kind = Literal["internal", "server", "client"]
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


class Span(Protocol):
    """Something that takes a while. Ended once, at the latest by the `with` block it stands in."""

    @property
    def traceparent(self) -> str:
        """What its children are told; empty: there is no trace."""
        ...

    def rename(self, name: str) -> None: ...

    def event(self, name: str, attributes: Attributes, at: float | None = None) -> None:
        """`at`: seconds of the monotonic clock; now, if it is not given."""
        ...

    def end(self, attributes: Attributes, error: str = "", at: float | None = None) -> None:
        """`error`: what went wrong, if anything did. What comes after the first end is ignored."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    """One per service."""

    @property
    def is_on(self) -> bool:
        """Spans go somewhere."""
        ...

    def span(
        self,
        name: str,
        parent: str,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        start: float | None = None,
    ) -> Span:
        """`parent`: a valid traceparent, or empty. `start`: seconds of the monotonic clock; now, if it is not given."""
        ...

    async def close(self) -> None:
        """Send what is left, within a bounded time."""
        ...


class _NoSpan:
    """Its children are its parent's."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def rename(self, name: str) -> None:
        pass

    def event(self, name: str, attributes: Attributes, at: float | None = None) -> None:
        pass

    def end(self, attributes: Attributes, error: str = "", at: float | None = None) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class NoTracer:
    """Traces of others pass through: what this service calls belongs to them."""

    is_on = False

    def span(
        self,
        name: str,
        parent: str,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        start: float | None = None,
    ) -> Span:
        return _NoSpan(parent)

    async def close(self) -> None:
        pass


def valid_traceparent(header: str) -> str:
    """`header` as version 00 of the format, or nothing if it is none: a broken one must not cost the request."""
    match = _TRACEPARENT.fullmatch(header)
    if match is None or (match[1] == "00" and match[3]):
        return ""
    return f"00-{match[2]}"


def trace_id(traceparent: str) -> str:
    return traceparent[3:35]
