"""A request's time on one worker: what it asks of the worker's link, what it hears, and how that may end."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from fissile.errors import FissileError
from fissile.v1 import RequestOutput, SequenceGroup
from router.answering.completion import Completion
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


class Stay:
    """What a request has on a worker, from its sending to the one `leave`. Whoever hears of a loss has the request: the
    stay is let go with it, so that both need no garbage collector."""

    __slots__ = ("_attempt", "_completions", "_hop", "_timer", "on_loss")

    def __init__(
        self,
        hop: Hop,
        ids: Iterable[int],
        completions: Iterable[Completion],
        on_loss: OnLoss,
        timer: asyncio.TimerHandle,
    ) -> None:
        """`ids`: of the sequences there that go on with `completions`. `timer` ends a wait for the first output."""
        self.on_loss = on_loss
        self._hop = hop
        self._completions = dict(zip(ids, completions, strict=True))
        self._attempt = hop.attempt()
        self._timer: asyncio.TimerHandle | None = timer

    @property
    def awaits_first_output(self) -> bool:
        return self._timer is not None

    def completion(self, sequence_id: int) -> Completion | None:
        """None: it has ended there, or never was."""
        return self._completions.get(sequence_id)

    def output_came(self) -> bool:
        """Whether it is the first one."""
        timer, self._timer = self._timer, None
        if timer is None:
            return False
        timer.cancel()
        return True

    def succeeded(self) -> None:
        self._attempt.succeeded()

    def failed(self) -> None:
        """By a fault of the worker's."""
        self._attempt.failed()

    def ended(self, sequence_id: int, *, by_worker: bool) -> None:
        """Its completion is finished: by a stop string, which the worker does not know, or `by_worker`."""
        del self._completions[sequence_id]
        if not by_worker:
            self._hop.abort(sequence_id)

    def leave(self) -> None:
        """Abort what is there still."""
        self.output_came()
        for sequence_id in self._completions:
            self._hop.abort(sequence_id)
        self._completions.clear()
        self._attempt.end()
