"""An open request's way over workers: place it, pass on what comes, move it when its worker is lost."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fissile.errors import InternalError, UnavailableError
from router.answering.merging import merged
from router.answering.request import Loss, OpenRequest, Update
from router.fleet.link import WorkerLink
from router.fleet.policy import Policy
from router.fleet.quarantine import Quarantine
from router.fleet.retries import Retries, Session
from router.fleet.workers import WorkerSet
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

TimeLeft = Callable[[], float | None]
"""Seconds to the deadline; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """Seconds."""

    worker_wait: float = 5.0
    max_retries: int = 3
    first_token_timeout: float = 300.0


class Dispatcher:
    """Stateless but for the policy."""

    def __init__(self, workers: WorkerSet, policy: Policy, config: DispatchConfig, metrics: RouterMetrics) -> None:
        self._workers = workers
        self._policy = policy
        self._config = config
        self._metrics = metrics
        self._quarantine = Quarantine()

    def updates(self, requests: Sequence[OpenRequest], time_left: TimeLeft) -> AsyncGenerator[Update]:
        """Messages for the client, of all the prompts of its call; the last has `usage`. Raises the FissileError that
        ends the call otherwise."""
        spec = requests[0].spec
        if len(requests) == 1:
            return self._updates(requests[0], time_left, spec.heartbeat)
        streams = [self._updates(request, time_left, None) for request in requests]
        return merged(streams, heartbeat=spec.heartbeat, final_only=spec.final_only)

    async def _updates(
        self, request: OpenRequest, time_left: TimeLeft, heartbeat: float | None
    ) -> AsyncGenerator[Update]:
        retries = Retries(self._config.max_retries)
        hop = await self._place(request, retries, time_left)
        while True:
            is_silent = await _is_silent(request, heartbeat)
            update = request.take() or (Update() if is_silent else None)
            if update is not None:
                yield update
                if update.usage:
                    return
            if request.error:
                raise request.error
            if request.lost:
                self._count(request, request.lost, hop, retries)
                hop = await self._place(request, retries, time_left)

    def _count(self, request: OpenRequest, loss: Loss, hop: Session, retries: Retries) -> None:
        request_id = request.spec.request_id
        try:
            retries.count(hop, loss, request.num_completion_tokens)
        except InternalError as error:
            logger.error("request %s: %s", request_id, error.message)
            raise
        logger.info("request %s moves: %s", request_id, loss.detail)
        self._metrics.moved(request.spec.model)

    async def _place(self, request: OpenRequest, retries: Retries, time_left: TimeLeft) -> Session:
        """Put the request on a worker it has not failed on; waits a bounded time for one."""
        try:
            async with asyncio.timeout(self._config.worker_wait):
                while not (candidates := await self._candidates(request, retries)):
                    if request.lost and request.lost.refusal:
                        raise request.lost.refusal
                    await _first(self._workers.wait_for_change(), request.news.wait())
                    if request.error:
                        raise request.error
        except TimeoutError:
            why = f"; the last one: {request.lost.detail}" if request.lost else ""
            raise UnavailableError(
                f"no healthy worker for {request.spec.model} within {self._config.worker_wait:g} s{why}",
                retry_after=1.0,
            ) from None
        link: WorkerLink = self._policy.choose(candidates)
        request.put_on(link, self._config.first_token_timeout, time_left())
        if retries.is_suspect:
            self._quarantine.put_on(link.session, request)
        return link.session

    async def _candidates(self, request: OpenRequest, retries: Retries) -> Sequence[WorkerLink]:
        """Available now; for a suspect those without another one, if it comes to that soon."""

        def found() -> list[WorkerLink]:
            spec = request.spec
            links = self._workers.candidates(spec.model, spec.tokenizer_fingerprint, spec.dp_rank)
            return [link for link in links if link.session not in retries.failed]

        return await self._quarantine.turn(found) if retries.is_suspect else found()


async def _is_silent(request: OpenRequest, heartbeat: float | None) -> bool:
    """Wait until there is news. True: a heartbeat is due first."""
    try:
        async with asyncio.timeout(heartbeat):
            await request.news.wait()
    except TimeoutError:
        return True
    return False


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Until one of them is over."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
