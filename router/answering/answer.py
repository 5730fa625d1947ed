"""The answer to one call: what is new of all its prompts, as it comes.

What a client has not read yet merges inside each prompt's own request, so nothing waits between the two.
"""

import asyncio
from collections.abc import Sequence

from fissile.errors import FissileError
from fissile.v1 import RequestTimings, Usage
from router.answering.completion import Delta
from router.answering.heartbeats import Silence
from router.answering.request import OpenRequest
from router.answering.update import MAX_ENTRIES, Update


class Answer:
    """Of one or more requests that share `news`."""

    def __init__(self, requests: Sequence[OpenRequest], silence: Silence | None) -> None:
        """`silence`: until a heartbeat; None: there are none."""
        self._news = requests[0].news
        self._silence = silence
        self._final_only = requests[0].spec.final_only
        self._take = requests[0].take if len(requests) == 1 else self._take_all
        self._open = dict(enumerate(requests))
        """By position, those that have not said all."""
        self._usages: list[Usage] = []
        self._timings: list[RequestTimings] = []

    async def next(self) -> Update:
        """Waits for what is new. It is empty after as much silence as there may be; the last one has usage and
        timings of all prompts. Raises the error that ends the call, once what came before it is taken."""
        while True:
            if self._silence is None:  # a time-out costs a tenth of what a message does here
                await self._news.wait()
                is_silent = False
            else:
                is_silent = await self._is_silent(self._silence())
            error = self._error()
            if error is None:
                self._news.clear()
            update = self._take()
            if update is not None:
                if update.num_entries > MAX_ENTRIES // 2:
                    await asyncio.sleep(0)  # more may wait, and the transport need not: others come in between
                return update
            if error:
                raise error
            if is_silent:
                return Update()

    async def _is_silent(self, seconds: float) -> bool:
        """Wait until there is news. True: a heartbeat is due first."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return True
        return False

    def _error(self) -> FissileError | None:
        """The first one."""
        for request in self._open.values():
            if request.error:
                return request.error
        return None

    def _take_all(self) -> Update | None:
        if self._final_only and not all(request.is_finished for request in self._open.values()):
            return None
        deltas: list[Delta] = []
        max_entries = MAX_ENTRIES
        for position, request in list(self._open.items()):
            update = request.take(max_entries)
            if update is None:
                continue
            for delta in update.deltas:
                delta.prompt_index = position
            deltas += update.deltas
            max_entries -= update.num_entries
            if update.usage and update.timings:
                del self._open[position]
                self._usages.append(update.usage)
                self._timings.append(update.timings)
            elif self._final_only:
                break  # the next message goes on with it
            if max_entries <= 0:
                self._news.set()
                break
        if not self._open:
            return Update(deltas, MAX_ENTRIES - max_entries, _sum(self._usages), _slowest(self._timings))
        return Update(deltas, MAX_ENTRIES - max_entries) if deltas else None


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(**{field.name: sum(getattr(u, field.name) for u in usages) for field in Usage.DESCRIPTOR.fields})


def _slowest(timings: Sequence[RequestTimings]) -> RequestTimings:
    """The first token of any prompt; of everything else the longest."""
    result = RequestTimings()
    for field in RequestTimings.DESCRIPTOR.fields:
        values = [getattr(t, field.name) for t in timings if t.HasField(field.name)]
        if values:
            choose = min if field.name == "ttft" else max
            getattr(result, field.name).CopyFrom(choose(values, key=lambda value: value.ToNanoseconds()))
    return result
