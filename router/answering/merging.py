"""One stream of updates from those of several prompts.

A prompt's stream waits until its update is taken, so what a slow client has not read yet merges inside the prompt's
own request, as it does for a single one.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from fissile.v1 import RequestTimings, Usage
from router.answering.completion import Delta
from router.answering.request import Update

_Arrival = tuple[int, Update | Exception | None]
"""Which stream brought what. None: it has ended."""


async def merged(
    streams: Sequence[AsyncIterator[Update]], *, heartbeat: float | None, final_only: bool
) -> AsyncGenerator[Update]:
    """Updates as they come; the last has usage and timings of all. With `final_only` there is one. `heartbeat`: seconds
    of silence after which an empty update comes. An error of one stream ends all."""
    usages: list[Usage] = []
    timings: list[RequestTimings] = []
    held: list[Delta] = []
    async with aclosing(_arrivals(streams, heartbeat)) as arrivals:
        async for position, update in arrivals:
            for delta in update.deltas:
                delta.prompt_index = position
            if update.usage and update.timings:
                usages.append(update.usage)
                timings.append(update.timings)
            if len(usages) == len(streams):
                yield Update(held + update.deltas, usage=_sum(usages), timings=_slowest(timings))
            elif final_only and update.deltas:
                held += update.deltas
            else:
                yield Update(update.deltas)


async def _arrivals(
    streams: Sequence[AsyncIterator[Update]], heartbeat: float | None
) -> AsyncGenerator[tuple[int, Update]]:
    queue: asyncio.Queue[_Arrival] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_forward(i, stream, queue)) for i, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            try:
                async with asyncio.timeout(heartbeat):
                    position, arrived = await queue.get()
            except TimeoutError:
                position, arrived = 0, Update()
            if arrived is None:
                num_open -= 1
            elif isinstance(arrived, Exception):
                raise arrived
            else:
                yield position, arrived
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(position: int, stream: AsyncIterator[Update], queue: "asyncio.Queue[_Arrival]") -> None:
    try:
        async for update in stream:
            await queue.put((position, update))
    except Exception as error:
        await queue.put((position, error))
    else:
        await queue.put((position, None))


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
