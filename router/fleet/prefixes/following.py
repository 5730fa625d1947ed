"""Follows the workers: a view for each that is available, and none for any other."""

import asyncio
import logging

import grpc

from common.block_hash import HASH_SCHEME
from fissile.errors import from_rpc_error
from fissile.v1 import GetWorkerResponse, WatchKvEventsRequest, WorkerServiceStub
from router.fleet.link import WorkerLink
from router.fleet.prefixes.kv_feed import KvFeed, KvGapError
from router.fleet.prefixes.prefixes import Prefixes
from router.fleet.session import Session
from router.fleet.workers import WorkerSet
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""From a subscription that failed to the next one."""


class PrefixFollower:
    """`start`, then `close`. A worker that tells of its cache is subscribed to once there is another one to choose; of
    others a history is kept."""

    def __init__(self, workers: WorkerSet, prefixes: Prefixes, metrics: RouterMetrics, *, use_events: bool) -> None:
        self._workers = workers
        self._prefixes = prefixes
        self._metrics = metrics
        self._use_events = use_events
        self._feeds: dict[Session, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._following = asyncio.create_task(self._follow_forever())

    async def close(self) -> None:
        """Idempotent. No view is left."""
        if self._following:
            self._following.cancel()
        feeds = list(self._feeds.values())
        self._follow({})
        await asyncio.gather(*feeds, *([self._following] if self._following else []), return_exceptions=True)

    async def _follow_forever(self) -> None:
        while True:
            self._follow({link.session: link for link in self._workers.links.values() if link.is_available})
            await self._workers.wait_for_change()

    def _follow(self, links: dict[Session, WorkerLink]) -> None:
        for session in set(self._prefixes.sessions) - links.keys():
            self._forget(session)
        for session, link in links.items():
            assert link.info  # it is available
            follows = self._use_events and len(links) > 1 and _tells(link.info)
            if session not in self._prefixes.sessions or (follows and session not in self._feeds):
                self._forget(session)  # its history, if it was alone until now
                self._begin(link, follows=follows)

    def _forget(self, session: Session) -> None:
        if feed := self._feeds.pop(session, None):
            feed.cancel()
        self._prefixes.forget(session)

    def _begin(self, link: WorkerLink, *, follows: bool) -> None:
        info, stub = link.info, link.stub
        assert info and stub  # it is available
        if follows:
            view = self._prefixes.follow(link.session, info.block_size)
            feed = self._feed_forever(stub, link.address, KvFeed(view, info.epoch))
            self._feeds[link.session] = asyncio.create_task(feed)
        else:
            self._prefixes.keep_history(link.session, info.block_size, info.num_blocks)

    async def _feed_forever(self, stub: WorkerServiceStub, address: str, feed: KvFeed) -> None:
        """One subscription after the other; each begins with a snapshot. What fails here is only a cache's picture: the
        worker stays."""
        while True:
            try:
                async for response in stub.WatchKvEvents(WatchKvEventsRequest()):
                    feed.apply(response)
                what = "the worker ended them"
            except KvGapError as gap:
                what = str(gap)
            except grpc.aio.AioRpcError as error:
                what = from_rpc_error(error).message
            except Exception as error:
                logger.exception("KV events of worker %s failed", address)
                what = f"{type(error).__name__}: {error}"
            feed.restart()
            await asyncio.sleep(RETRY_SECONDS)
            # Whoever is still here has not lost the worker itself.
            self._metrics.kv_restarted()
            logger.info("KV events of worker %s begin anew: %s", address, what)


def _tells(info: GetWorkerResponse) -> bool:
    """Of its cache, in hashes that this router makes, too."""
    return "kv_events" in info.capabilities and info.hash_scheme == HASH_SCHEME and info.block_size > 0
