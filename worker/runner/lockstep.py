"""What a rank does next: the steps that its executor sends, or, among data-parallel ranks that share experts, what all
of them do together.

A model whose experts are spread over the ranks of several workers computes a step only if all ranks make one. So they
agree before each, in **one collective** on the host: who has a batch, how large, and who wants to stop. If any worker
has one, all make a step: a dummy one where there is nothing to do. The engines know nothing of it.

- A worker runs its batch once *all* its ranks have it; all decide so from the same numbers, so they decide alike.
- When no rank has a batch, all go to sleep, which costs nothing: each waits for its executor, and for a key of their
  store whose name has the number of this sleep. Whoever has something to say sets the key, and all meet in the next
  collective. The key stays until all have left that sleep, so that no call to wake up is missed, however late a rank
  began to listen.
- A rank whose engine has just been answered waits a moment for the step to come before it says that there is none:
  otherwise it would make a dummy step in its stead.
- A rank that is told to stop goes on making dummy steps until all have been told; then all end.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from worker.core.batch import ScheduledBatch
from worker.kernels.step import Round
from worker.parallel.group import Group
from worker.runner.messages import StartProfile, StepMessage, Stop, StopProfile

GRACE_SECONDS = 0.002
"""For an engine to send its next step once it has been answered."""
SLEEP = timedelta(days=1)
"""After which whoever waits for a key asks for it again."""


@dataclass(frozen=True, slots=True)
class Answered:
    """To the thread that runs steps, from that which sends results: another one is with the engine."""


@dataclass(frozen=True, slots=True)
class Woken:
    """To the thread that runs steps: a rank has set the key of this sleep."""


Inbox = queue.SimpleQueue[StepMessage | Answered | Woken]
"""Of the thread that runs steps."""


class Turn(NamedTuple):
    """What to do next."""

    message: ScheduledBatch | StartProfile | StopProfile
    together: Round | None = None


def turns_alone(inbox: Inbox) -> Iterator[Turn]:
    """What comes, in its order, until `Stop`."""
    while not isinstance(message := inbox.get(), Stop):
        if isinstance(message, ScheduledBatch | StartProfile | StopProfile):
            yield Turn(message)


class Alarm:
    """Keys of a store, one for each sleep; sleeps have the same numbers on all ranks."""

    def __init__(self, store: Store, rank: int, inbox: Inbox, on_lost: Callable[[str], object]) -> None:
        """`on_lost` is called, from another thread, when the store cannot be asked any more."""
        self._store, self._rank, self._inbox, self._on_lost = store, rank, inbox, on_lost
        self._number = 0
        self._has_rung = False
        self._sleeps: queue.SimpleQueue[int] = queue.SimpleQueue()
        listening = store.clone()  # type: ignore[attr-defined]
        threading.Thread(target=self._listen, args=(listening,), name="alarm", daemon=True).start()

    def set(self) -> None:
        """At the beginning of a sleep: `Woken` will come. All ranks have left the one before."""
        self._number += 1
        self._has_rung = False
        if self._rank == 0 and self._number > 1:
            self._store.delete_key(_key(self._number - 1))
        self._sleeps.put(self._number)

    def ring(self) -> None:
        """Wake all, this rank too. Idempotent."""
        if not self._has_rung:
            self._has_rung = True
            self._store.set(_key(self._number), "")

    def _listen(self, store: Store) -> None:
        """A wait holds a connection of its own."""
        while True:
            key = _key(self._sleeps.get())
            try:
                while not _wait(store, key):
                    pass
            except RuntimeError as error:
                self._on_lost(f"the ranks' store is gone: {error}")
                return
            self._inbox.put(Woken())


class Lockstep:
    """Of one rank. One thread owns it."""

    def __init__(
        self, inbox: Inbox, control: Group, num_tp: int, alarm: Alarm, make_dummy: Callable[[Round], ScheduledBatch]
    ) -> None:
        """`control` has `num_tp` ranks of each worker, one worker after the other. `make_dummy` is asked for what a
        rank without a batch computes."""
        self._inbox, self._control, self._num_tp = inbox, control, num_tp
        self._alarm, self._make_dummy = alarm, make_dummy
        self._messages: deque[StepMessage] = deque()
        """Of the executor, not carried out yet."""
        self._is_awake = False
        self._num_unanswered = 0
        self._is_more_expected = False
        self._has_said_stop = False
        alarm.set()

    def turns(self) -> Iterator[Turn]:
        """Until all ranks have been told to stop."""
        while True:
            while self._take(block=False):
                pass
            head = self._messages[0] if self._messages else None
            if isinstance(head, StartProfile | StopProfile):
                self._messages.popleft()
                yield Turn(head)
            elif not self._is_awake:
                if isinstance(head, ScheduledBatch) or (isinstance(head, Stop) and not self._has_said_stop):
                    self._alarm.ring()
                self._take()
            elif head is None and self._is_more_expected:
                self._wait_for_engine()
            else:
                agreed = self._agree(head)
                if agreed is None:
                    return
                yield from agreed

    def _take(self, *, block: bool = True, timeout: float | None = None) -> bool:
        """Take in one thing that has come; whether there was any."""
        try:
            item = self._inbox.get(block, timeout)
        except queue.Empty:
            return False
        if isinstance(item, Woken):
            self._is_awake = True
        elif isinstance(item, Answered):
            self._num_unanswered -= 1
        else:
            self._messages.append(item)
        return True

    def _wait_for_engine(self) -> None:
        if self._num_unanswered:
            self._take()
        elif not self._take(timeout=GRACE_SECONDS):
            self._is_more_expected = False

    def _agree(self, head: StepMessage | None) -> list[Turn] | None:
        """What this rank does in this round, if anything; None: all stop."""
        workers = self._tell(head)
        if all(word.is_stopping for worker in workers for word in worker):
            return None
        if not any(word.num_tokens for worker in workers for word in worker):
            self._is_awake = False
            self._alarm.set()
            return []
        running = [worker[0] for worker in workers if all(word.num_tokens for word in worker)]
        if not running:
            return []  # a batch is on its way to the other ranks of its worker
        together = Round(
            num_tokens=max(word.num_tokens for word in running),
            is_uniform=all(word.is_uniform for word in running),
            num_drafts=max(word.num_drafts for word in running),
            num_drafted_rows=max(word.num_drafted_rows for word in running),
        )
        if not all(word.num_tokens for word in workers[self._control.rank // self._num_tp]):
            return [Turn(self._make_dummy(together), together)]
        batch = self._messages.popleft()
        assert isinstance(batch, ScheduledBatch)
        self._num_unanswered += 1
        self._is_more_expected = True
        return [Turn(batch, together)]

    def _tell(self, head: StepMessage | None) -> "list[list[_Word]]":
        """What each rank has to say, by worker. Waits for all of them."""
        word = _Word.of(head)
        self._has_said_stop = word.is_stopping
        said = self._control.all_gather(torch.tensor([astuple(word)], dtype=torch.int64))
        words = [_Word(*numbers) for numbers in said.tolist()]
        return [words[first : first + self._num_tp] for first in range(0, len(words), self._num_tp)]


@dataclass(frozen=True, slots=True)
class _Word:
    """What a rank says of itself before each round. Others' are made of whole numbers, of which 1 is true."""

    num_tokens: int = 0
    """Of its next batch; 0: it has none."""
    is_uniform: bool = True
    is_stopping: bool = False
    num_drafts: int = 0
    """See `Round`."""
    num_drafted_rows: int = 0

    @classmethod
    def of(cls, head: StepMessage | None) -> "_Word":
        if not isinstance(head, ScheduledBatch):
            return cls(is_stopping=isinstance(head, Stop))
        drafts = head.num_draft_tokens.values()
        return cls(
            num_tokens=head.num_tokens,
            is_uniform=head.num_tokens == len(head.slots) and all(head.samples),
            num_drafts=max(drafts, default=0),
            num_drafted_rows=len(drafts),
        )


def _key(sleep: int) -> str:
    return f"wake-up/{sleep}"


def _wait(store: Store, key: str) -> bool:
    """Whether the key is there; asks for `SLEEP` at most. Raises RuntimeError when the store is gone."""
    try:
        store.wait([key], SLEEP)
    except dist.DistStoreError:
        return False
    return True
