"""WatchKvEvents: what is in the prefix cache, as a snapshot, then every change in order."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

from common.block_hash import ROOT_HASH
from fissile import v1
from worker.core.cache.kv_events import BlockRemoved, BlockStored, KvEvent, KvEvents
from worker.core.scheduler import Scheduler
from worker.engine.engine import Engine

EVENT_CAPACITY = 16_384
"""Events kept for watchers. One that falls further behind gets a snapshot."""
SNAPSHOT_PART_TOKENS = 65_536
MIN_INTERVAL_SECONDS = 0.05
"""Between two looks for changes: to ask the engine costs, and so does a message on both sides, and a step may be a few
milliseconds."""
MIN_INTERVAL_SECONDS_ON_CPU = 0.25
"""Where the model runs on the same cores: a prompt takes as long there."""


class Progress:
    """Wakes whoever waits for the engine to get on. Used on the event loop only."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def signal(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def next(self) -> asyncio.Future[None]:
        """Done at the next signal. Take it before looking at the state, so that no change is missed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        return waiter


def min_interval(device: str) -> float:
    """Seconds between two looks, where the model runs on `device`."""
    return MIN_INTERVAL_SECONDS_ON_CPU if device == "cpu" else MIN_INTERVAL_SECONDS


async def watch_kv_events(
    engine: Engine, progress: Progress, block_size: int, number: int, interval: float
) -> AsyncIterator[v1.WatchKvEventsResponse]:
    """For ever. `number` is that of the last event the watcher has seen, 0 if none; `interval`: seconds from one look
    for changes to the next, at least.

    Raises UnavailableError when the engine ends.
    """
    needs_snapshot = number == 0
    while True:
        changed = progress.next()
        if needs_snapshot:
            number, blocks = await asyncio.wrap_future(engine.call(lambda s: _events(s).snapshot()))
            needs_snapshot = False
            for response in snapshot_to_pb(number, blocks, block_size):
                yield response
        looked_at = time.monotonic()
        events = await asyncio.wrap_future(engine.call(partial(_since, number)))
        if events is None:
            needs_snapshot = True
        elif events:
            pb_events = [event_to_pb(event, block_size) for _, event in events]
            yield v1.WatchKvEventsResponse(sequence_number=events[0][0], events=pb_events)
            number = events[-1][0]
        else:
            await changed
        await asyncio.sleep(max(0.0, looked_at + interval - time.monotonic()))


def snapshot_to_pb(number: int, blocks: list[BlockStored], block_size: int) -> Iterator[v1.WatchKvEventsResponse]:
    """At least one message; all carry `number`. Blocks that follow each other in a chain share an event."""
    events = [v1.KvEvent(cleared=v1.KvCacheCleared())]
    num_tokens = 0
    last_hash = ROOT_HASH
    for block in blocks:
        if num_tokens >= SNAPSHOT_PART_TOKENS:
            yield v1.WatchKvEventsResponse(sequence_number=number, events=events, is_snapshot=True)
            events, num_tokens, last_hash = [], 0, ROOT_HASH
        if block.parent_hash == last_hash != ROOT_HASH:
            run = events[-1].stored
            run.block_hashes.append(block.hash)
            run.token_ids.extend(block.token_ids)
        else:
            events.append(v1.KvEvent(stored=_stored_to_pb(block, block_size)))
        last_hash = block.hash
        num_tokens += block_size
    yield v1.WatchKvEventsResponse(sequence_number=number, events=events, is_snapshot=True)


def event_to_pb(event: KvEvent, block_size: int) -> v1.KvEvent:
    if isinstance(event, BlockStored):
        return v1.KvEvent(stored=_stored_to_pb(event, block_size))
    if isinstance(event, BlockRemoved):
        return v1.KvEvent(removed=v1.KvBlocksRemoved(block_hashes=[event.hash]))
    return v1.KvEvent(cleared=v1.KvCacheCleared())


def _stored_to_pb(block: BlockStored, block_size: int) -> v1.KvBlocksStored:
    return v1.KvBlocksStored(
        block_hashes=[block.hash],
        parent_hash=block.parent_hash,
        token_ids=block.token_ids,
        cache_salt=block.salt,
        block_size=block_size,
    )


def _events(scheduler: Scheduler) -> KvEvents:
    events = scheduler.watch_kv_events(EVENT_CAPACITY)
    assert events is not None  # prefix caching is on
    return events


def _since(number: int, scheduler: Scheduler) -> list[tuple[int, KvEvent]] | None:
    return _events(scheduler).since(number)
