"""How much is done in one turn of the event loop, and for whom.

gRPC takes up a call in five turns, one call after the other (`common/server.py`), and the steps of a call that was
taken up are turns, too. A turn is as long as all that is ready in it: a step of a worker that wakes 300 streams at
once is 60 ms of writing, and a new call waits five times that. So what wakes tasks by the hundred wakes some of them in
each turn. A call stands in line for that several times on its way, and clients take turns there: else whoever opens a
thousand calls at once would be in front of all others each time.

While gRPC takes up calls, messages get shorter turns: what a burst of one client costs the others is mostly the turns
that pass until gRPC comes to the calls behind it.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from router.admission.fair_queue import FairQueue

UNITS_PER_TURN = 4.0
"""About a millisecond. A unit is what a small message costs."""
UNITS_BESIDE_CALLS = 2.0
"""While calls are taken up and messages wait. Shorter ones cost more turns than they save time."""
TURNS_OF_CALL = 8
"""Between two calls that gRPC takes up one after the other: its five, and some that its thread may be late."""
CALL = 4.0
"""What it costs to check a small request, make it ready and send it to a worker, with COMPLETIONS_PER_UNIT at most."""
COMPLETIONS_PER_UNIT = 16
"""To open, or to send to a worker: a request may have 256 prompts with 128 each."""

Callback = Callable[[], object]


class Ration:
    """One per event loop."""

    def __init__(self) -> None:
        self._left = UNITS_PER_TURN
        """Until it is used up, whatever turns that takes; below zero it is taken from the next ones."""
        self._urgent: FairQueue[Callback] = FairQueue()
        self._line: FairQueue[Callback] = FairQueue()
        self._is_coming_back = False
        self._is_turn_of_urgent = False
        self._num_turns_since_call = TURNS_OF_CALL

    def call_came(self) -> None:
        """gRPC has taken up a call, and may have more."""
        self._num_turns_since_call = 0

    def wake(self, client: str, callback: Callback, cost: float = 1.0, *, is_urgent: bool = False) -> None:
        """Call it, now or in one of the next turns: it wakes a task to do what costs so much for the client. What is
        urgent stands in a line of its own, and the two lines take turns: neither starves the other."""
        line = self._urgent if is_urgent else self._line
        if self._left > 0 and not line:
            self.spend(cost)
            callback()
        else:
            line.push(client, callback, cost)

    def spend(self, cost: float) -> None:
        """What is done in this turn costs so much more than was thought."""
        self._left -= cost
        if self._left <= 0 and not self._is_coming_back:
            self._is_coming_back = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    async def granted(self, client: str, cost: float) -> None:
        """Wait for a turn that has room for what follows."""
        if self._left > 0 and not self._urgent:
            self.spend(cost)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._urgent.push(client, partial(_grant, granted), cost)
        await granted

    def _next_turn(self) -> None:
        self._is_coming_back = False
        self._num_turns_since_call += 1
        units = UNITS_BESIDE_CALLS if self._line and self._num_turns_since_call < TURNS_OF_CALL else UNITS_PER_TURN
        self._left = min(units, self._left + units)
        while self._left > 0 and (self._urgent or self._line):
            self._is_turn_of_urgent = not self._is_turn_of_urgent
            line = (self._urgent or self._line) if self._is_turn_of_urgent else (self._line or self._urgent)
            ticket = line.pop()
            self.spend(ticket.cost)
            ticket.item()
        self.spend(0.0)


def _grant(waiting: "asyncio.Future[None]") -> None:
    """Unless it has gone."""
    if not waiting.done():
        waiting.set_result(None)
