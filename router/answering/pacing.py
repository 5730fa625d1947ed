"""How often streams send. A message costs the same whether it carries one token or ten, so under load several steps of
a worker share one.

All streams together may send `rate` messages a second, and `BURST_SECONDS` worth of them at once after a quiet time.
Below that rate nothing waits. Above it clients take turns, and the streams of each: 64 streams at 3,000 messages a
second send every 21 ms, however fast the worker is, and their tokens merge meanwhile. What a client waits for most, the
first message and the last one, goes out of turn. A message with many log probabilities counts as several. A busy event
loop sends less (`headroom.py`).

Who waits is served when tokens come, for whatever stream: messages leave together, since each wakes threads here and at
the client, and with the newest tokens in them; over some turns of the event loop where they are many. A timer serves
where none come, and not before the next ones are late.
"""

import asyncio
import time

from router.admission.fair_queue import FairQueue, Ticket
from router.admission.ration import Ration
from router.answering.headroom import Headroom

BURST_SECONDS = 0.1
_REFILL_SECONDS = 0.001
TICK_SECONDS = 0.02
"""After which who waits is served where no tokens come."""
_MIN_GAP_SECONDS = 0.01
"""What comes within is of one step, in whatever messages."""
_MAX_GAP_SECONDS = 0.15
"""Between tokens and the next ones that are waited for: where they come less often, who waits is served by ticks. A
worker on a CPU pauses for 75 ms, and until the end of a step."""
_LATE = 1.5
"""Times the last gap."""


class News:
    """Wakes a stream of `client`: an `asyncio.Event` for the one task that waits, at half the price."""

    __slots__ = ("_is_set", "_waiter", "client", "is_due")

    def __init__(self, client: str) -> None:
        self.client = client
        self.is_due = False
        """It is set, or about to be."""
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self.is_due = self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self.is_due = self._is_set = False

    async def wait(self) -> None:
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


class Pacer:
    """One per router. A stream is known by the event that wakes it."""

    def __init__(self, rate: float, ration: Ration) -> None:
        self._rate = rate
        self._ration = ration
        self._headroom = Headroom()
        self._burst = max(1.0, rate * BURST_SECONDS)
        self._allowance = self._burst
        self._counted_at = time.monotonic()
        self._queue: FairQueue[News] = FairQueue()
        self._waiting: dict[News, Ticket[News]] = {}
        self._timer: asyncio.TimerHandle | None = None
        """There is one while somebody waits."""
        self._came_at = self._counted_at
        """When tokens came last."""
        self._wait_seconds = TICK_SECONDS
        """For the next ones."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def wake_in_turn(self, news: News) -> None:
        """Set `news`: now if the rate allows it, else in turn. Does nothing for one that is set or waits already."""
        if news.is_due:
            return
        self._tokens_came()
        self._serve()
        if not news.is_due and news not in self._waiting:
            if not self._waiting and self._allowance >= 1.0:
                self._queue.serve(news.client, 1.0)
                self._send(news)
                return
            self._waiting[news] = self._queue.push(news.client, news)
        if self._waiting and self._timer is None:
            self._come_back(self._wait_seconds)

    def wake_now(self, news: News) -> None:
        """Set `news` out of turn; it counts all the same."""
        self.forget(news)
        if not news.is_due:
            self._count(news, 1.0)
            self._wake(news, is_urgent=True)

    def charge(self, news: News, num_messages: float) -> None:
        """What it sends counts as so many messages more."""
        if num_messages:
            self._ration.spend(num_messages)
            self._count(news, num_messages)

    def _count(self, news: News, num_messages: float) -> None:
        self._allowance -= num_messages
        self._queue.charge(news.client, num_messages)

    def forget(self, news: News) -> None:
        """This stream sends no more."""
        ticket = self._waiting.pop(news, None)
        if ticket is not None:
            self._queue.remove(ticket)

    def _tokens_came(self) -> None:
        now = time.monotonic()
        self._refill(now)
        gap = now - self._came_at
        if gap < _MIN_GAP_SECONDS:
            return
        self._came_at = now
        self._wait_seconds = max(_LATE * gap, TICK_SECONDS) if gap < _MAX_GAP_SECONDS else TICK_SECONDS
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _advance(self) -> None:
        self._timer = None
        self._refill(time.monotonic())
        self._serve()
        if self._waiting:
            self._come_back(TICK_SECONDS)

    def _serve(self) -> None:
        """Wake as many as may send by now."""
        while self._waiting and self._allowance >= 1.0:
            news = self._queue.pop().item
            del self._waiting[news]
            self._send(news)

    def _refill(self, now: float) -> None:
        if now - self._counted_at < _REFILL_SECONDS:
            return  # tokens of hundreds of streams come in one message
        self._allowance = min(
            self._burst, self._allowance + (now - self._counted_at) * self._rate * self._headroom.share()
        )
        self._counted_at = now

    def _send(self, news: News) -> None:
        self._allowance -= 1.0
        self._wake(news)

    def _wake(self, news: News, *, is_urgent: bool = False) -> None:
        news.is_due = True
        self._ration.wake(news.client, news.set, is_urgent=is_urgent)

    def _come_back(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._advance)
