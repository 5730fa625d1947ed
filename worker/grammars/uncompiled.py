"""Requests that wait for their grammar to be compiled, before the engine hears of them. Used on the event loop only."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from worker.core.params import Grammar
from worker.core.sequence import Sequence


@dataclass(slots=True)
class _Request:
    members: list[Sequence]
    """The sequences of a group, the parent first, that have not been taken out."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class UncompiledRequests:
    """Each request leaves once: by `on_compiled`, or because its last sequence was taken out."""

    def __init__(
        self,
        compiled: Callable[[Grammar], "Future[None]"],
        on_compiled: Callable[[list[Sequence], BaseException | None], None],
        on_deadline: Callable[[int], None],
    ) -> None:
        """`on_compiled` gets the sequences that are left, and what went wrong; `on_deadline` the id of a sequence whose
        deadline has passed, which is still in."""
        self._compiled = compiled
        self._on_compiled = on_compiled
        self._on_deadline = on_deadline
        self._requests: dict[int, _Request] = {}
        """By the id of each member."""

    def add(self, members: list[Sequence]) -> None:
        """At least one of them has a grammar."""
        request = _Request(members)
        loop = asyncio.get_running_loop()
        for seq in members:
            self._requests[seq.id] = request
            if seq.deadline is not None:
                # The loop's clock and that of deadlines are the same, time.monotonic.
                request.timers.append(loop.call_at(seq.deadline, self._expire, seq.id))
        grammars = {seq.sampling.grammar: None for seq in members if seq.sampling.grammar is not None}
        futures = [asyncio.wrap_future(self._compiled(grammar)) for grammar in grammars]
        asyncio.gather(*futures).add_done_callback(partial(self._finish, request))

    def take(self, sequence_id: int) -> Sequence | None:
        """Take a sequence out; None if it is not here. In a parent's place comes the next of its group."""
        request = self._requests.pop(sequence_id, None)
        if request is None:
            return None
        taken = next(seq for seq in request.members if seq.id == sequence_id)
        request.members.remove(taken)
        if not request.members:
            _cancel_timers(request)
        elif taken.parent_id is None:
            parent, *others = request.members
            parent.parent_id = None
            for seq in others:
                seq.parent_id = parent.id
        return taken

    def clear(self) -> None:
        """Take everything out."""
        for sequence_id in list(self._requests):
            self.take(sequence_id)

    def _finish(self, request: _Request, done: "asyncio.Future[list[None]]") -> None:
        error = done.exception()
        if not request.members:
            return
        _cancel_timers(request)
        for seq in request.members:
            del self._requests[seq.id]
        self._on_compiled(request.members, error)

    def _expire(self, sequence_id: int) -> None:
        if sequence_id in self._requests:
            self._on_deadline(sequence_id)


def _cancel_timers(request: _Request) -> None:
    for timer in request.timers:
        timer.cancel()
