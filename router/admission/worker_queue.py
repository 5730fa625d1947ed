"""Requests that wait for room on workers. They wait here and not there: here clients take turns, and a worker's own
queue stays so short that its order does not matter.

A client's share is counted in tokens, of prompt and answer; what an answer costs is guessed at first and put right at
its end (`FairQueue`). When the queue is full, who has most in it gives way: the last of its requests ends.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from fissile.errors import FissileError, ResourceExhaustedError
from router.admission.fair_queue import FairQueue, Ticket
from router.admission.ration import Ration

TICK_SECONDS = 0.005
MAX_RETRY_SECONDS = 30.0
MAX_LINES = 64
"""Beyond that, those that are empty are forgotten."""
MIN_GRANTS = 8
"""From here on it is known how fast the queue moves."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a request says of its workers, and does when its turn has come, or when it has to give way. `units`: what it
    costs the event loop to go."""

    has_room: Callable[[], bool]
    go: Callable[[], None]
    fail: Callable[[FissileError], None]
    units: float


@dataclass(slots=True)
class _Line:
    """Of what can go to the same workers."""

    queue: FairQueue[Waiting] = field(default_factory=FairQueue)
    grants: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    """When requests went, since some wait."""
    is_due: bool = False
    """The next one waits for its turn of the event loop."""


@dataclass(frozen=True, slots=True)
class Place:
    """A request's, from `enter` to `leave`."""

    line: _Line
    client: str
    cost: float
    ticket: Ticket[Waiting] | None

    @property
    def is_waiting(self) -> bool:
        """As `enter` gave it: it did not go at once."""
        return self.ticket is not None


class WorkerQueue:
    """Used on one event loop."""

    def __init__(self, max_queued: int, ration: Ration, now: Callable[[], float] = time.monotonic) -> None:
        self._max_queued = max_queued
        self._ration = ration
        self._now = now
        self._lines: dict[Hashable, _Line] = {}
        self._num_queued = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self._num_queued

    def num_waiting(self, key: Hashable) -> int:
        """Of the requests that entered with this key."""
        line = self._lines.get(key)
        return len(line.queue) if line else 0

    def enter(
        self,
        key: Hashable,
        client: str,
        waiting: Waiting,
        *,
        cost: float,
        priority: int,
        time_left: float | None,
    ) -> Place:
        """`waiting.go` is called now, which the loop's ration has granted, or when it is its turn; `key` names the
        workers that it may go to. Raises ResourceExhaustedError where the queue is full, or longer than there is time.
        """
        line = self._line(key)
        if not line.queue and waiting.has_room():
            line.queue.serve(client, cost)
            place = Place(line, client, cost, None)
            waiting.go()
            return place
        self._check_time(line, client, time_left)
        self._make_room(line, client)
        ticket = line.queue.push(client, waiting, cost, priority)
        self._num_queued += 1
        self._come_back()
        return Place(line, client, cost, ticket)

    def leave(self, place: Place, cost: float) -> None:
        """It has ended, wherever it was; `cost`: what it was in truth."""
        line = place.line
        if place.ticket is not None and line.queue.remove(place.ticket):
            self._num_queued -= 1
            return
        line.queue.charge(place.client, cost - place.cost)
        self._advance_line(line)

    def _line(self, key: Hashable) -> _Line:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= MAX_LINES:
                self._lines = {key: line for key, line in self._lines.items() if line.queue}
            line = self._lines[key] = _Line()
        return line

    def _check_time(self, line: _Line, client: str, time_left: float | None) -> None:
        if time_left is None:
            return
        wait = self._wait(line, client)
        if wait is not None and wait > time_left:
            raise ResourceExhaustedError(
                f"the deadline is in {time_left:.1f} s, and the queue for workers takes {wait:.1f} s by its rate",
                retry_after=min(wait, MAX_RETRY_SECONDS),
            )

    def _wait(self, line: _Line, client: str) -> float | None:
        """Seconds until a newcomer of this client goes, at the rate of now; None: that is not known."""
        if len(line.grants) < MIN_GRANTS:
            return None
        lengths = line.queue.lengths()
        own = lengths.pop(client, 0)
        num_before = own + sum(min(length, own + 1) for length in lengths.values())
        return num_before * (self._now() - line.grants[0]) / len(line.grants)

    def _make_room(self, line: _Line, client: str) -> None:
        """Where the queue is full, at the cost of who has most in it, if that is another client."""
        if self._num_queued < self._max_queued:
            return
        lengths: Counter[str] = Counter()
        for each in self._lines.values():
            lengths.update(each.queue.lengths())
        longest, length = max(lengths.items(), key=itemgetter(1), default=(client, 0))
        error = ResourceExhaustedError(
            f"the queue for workers is full: {self._num_queued} requests wait, {length} of them of the client that has "
            "most (max-queued-requests)",
            retry_after=min(self._wait(line, client) or 1.0, MAX_RETRY_SECONDS),
        )
        if length <= lengths[client] + 1:
            raise error
        full = max(self._lines.values(), key=lambda each: each.queue.waiting_of(longest))
        last = full.queue.last_of(longest)
        full.queue.remove(last)
        self._num_queued -= 1
        last.item.fail(error)

    def _come_back(self) -> None:
        if self._timer is None and self._num_queued:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._advance)

    def _advance(self) -> None:
        """Workers say with each step what room they have; nobody calls for it."""
        self._timer = None
        for line in list(self._lines.values()):
            self._advance_line(line)
        self._come_back()

    def _advance_line(self, line: _Line) -> None:
        """Where there is room on a worker, the next one waits for its turn of the loop, now or later."""
        if not line.queue:
            line.grants.clear()
            return
        ticket = line.queue.peek()
        if not line.is_due and ticket.item.has_room():
            line.is_due = True
            self._ration.wake(ticket.client, partial(self._next_goes, line), ticket.item.units, is_urgent=True)

    def _next_goes(self, line: _Line) -> None:
        """Whoever that is by now."""
        line.is_due = False
        if line.queue and line.queue.peek().item.has_room():
            line.grants.append(self._now())
            self._num_queued -= 1
            line.queue.pop().item.go()
        self._advance_line(line)
