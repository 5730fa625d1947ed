"""A line in which clients get equal shares of what things cost, however many things each has in it.

The virtual token counter of Sheng et al. ("Fairness in serving large language models", OSDI 2024): each client has a
counter of what it was served; the next thing is of the client with the lowest one. A client that comes anew, or back,
starts no lower than where the others are, so nobody saves up shares by being idle. What a thing really cost may be
counted later. A client's own things go by priority and arrival: how urgent one is, is between a client and itself.
"""

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_IDLE = 4096
"""Clients without anything in the line whose counters are kept."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A thing in the line."""

    client: str
    item: T
    cost: float
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    """A client's own."""

    tickets: list[tuple[int, int, Ticket[T]]] = field(default_factory=list)
    """A heap, by priority and arrival; some may be gone."""
    num_waiting: int = 0


class FairQueue(Generic[T]):
    """See above. Each operation takes time logarithmic in what waits."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        """Of clients that have something in it."""
        self._served: dict[str, float] = {}
        self._order: list[tuple[float, int, str]] = []
        """A heap of counters; those that are not a client's counter any more are passed over."""
        self._floor = 0.0
        """Counter of the client that was served last: where the others are."""
        self._numbers = itertools.count()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def waiting_of(self, client: str) -> int:
        line = self._lines.get(client)
        return line.num_waiting if line else 0

    def lengths(self) -> dict[str, int]:
        """Of all clients that wait."""
        return {client: line.num_waiting for client, line in self._lines.items()}

    def push(self, client: str, item: T, cost: float = 1.0, priority: int = 0) -> Ticket[T]:
        """Lower priorities go first."""
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line()
            self._set(client, max(self._floor, self._served.get(client, 0.0)))
        ticket = Ticket(client, item, cost)
        heapq.heappush(line.tickets, (priority, next(self._numbers), ticket))
        line.num_waiting += 1
        self._num_waiting += 1
        return ticket

    def peek(self) -> Ticket[T]:
        """The next one. There must be one."""
        while True:
            counter, _, client = self._order[0]
            if client in self._lines and self._served[client] == counter:
                break
            heapq.heappop(self._order)
        tickets = self._lines[client].tickets
        while tickets[0][2].is_gone:
            heapq.heappop(tickets)
        return tickets[0][2]

    def pop(self) -> Ticket[T]:
        """The same, and its cost is counted."""
        ticket = self.peek()
        heapq.heappop(self._lines[ticket.client].tickets)
        self._leave(ticket)
        self.serve(ticket.client, ticket.cost)
        return ticket

    def remove(self, ticket: Ticket[T]) -> bool:
        """Out of turn. False: it is not in the line any more."""
        if ticket.is_gone:
            return False
        self._leave(ticket)
        return True

    def last_of(self, client: str) -> Ticket[T]:
        """What would be served last of what it has in the line. It must have something."""
        return max(entry for entry in self._lines[client].tickets if not entry[2].is_gone)[2]

    def serve(self, client: str, cost: float) -> None:
        """Count what is served, here or without having waited."""
        served = self._served.get(client, 0.0)
        if served > self._floor:
            self._floor = served
        self._set(client, self._floor + cost)

    def charge(self, client: str, cost: float) -> None:
        """What was served cost more, or less, than was counted for it."""
        self._set(client, self._served.get(client, self._floor) + cost)

    def _leave(self, ticket: Ticket[T]) -> None:
        ticket.is_gone = True
        line = self._lines[ticket.client]
        line.num_waiting -= 1
        self._num_waiting -= 1
        if not line.num_waiting:
            del self._lines[ticket.client]

    def _set(self, client: str, counter: float) -> None:
        self._served[client] = counter
        if client in self._lines:
            heapq.heappush(self._order, (counter, next(self._numbers), client))
        if len(self._served) > MAX_IDLE + len(self._lines):
            self._forget()

    def _forget(self) -> None:
        """Those that would start where the others are; if that is not enough, all that are idle."""
        kept = {c: n for c, n in self._served.items() if c in self._lines or n > self._floor}
        if len(kept) > MAX_IDLE // 2 + len(self._lines):
            kept = {client: self._served[client] for client in self._lines}
        self._served = kept
