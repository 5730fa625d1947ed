"""A request's time on one worker: what it asks of the worker's link, what it hears, and how that may end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fissile.errors import FissileError
from fissile.v1 import RequestOutput, SequenceGroup
from router.latency import LatencyWindows


class Sink(Protocol):
    """Whom a sequence's outputs are for. None may block or raise."""

    def on_output(self, output: RequestOutput, now: float) -> None: ...

    def on_lost(self, detail: str, *, worker_died: bool) -> None: ...

    def on_stalled(self, detail: str) -> None: ...


class Attempt(Protocol):
    """What becomes of a request on a worker, which others go by: any of these, and `end` at last."""

    def succeeded(self) -> None: ...

    def failed(self) -> None: ...

    def end(self) -> None: ...


class Hop(Protocol):
    """The worker link a request is on."""

    @property
    def address(self) -> str: ...

    @property
    def latency(self) -> LatencyWindows: ...

    def start(self, group: SequenceGroup, sink: Sink, num_cached_tokens: int) -> list[int]: ...

    def attempt(self) -> Attempt: ...

    def abort(self, sequence_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a request's hop ended before the request did."""

    detail: str
    worker_died: bool = False
    is_fault: bool = False
    """Of the worker's, which lives."""
    refusal: FissileError | None = None
    """The worker would not take it; another one may."""


OnLoss = Callable[[Loss], None]
