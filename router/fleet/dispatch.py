"""An open request's way over workers: onto one, and on to another when that is lost."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from common.tracing import Span
from fissile.errors import FissileError, InternalError, UnavailableError
from router.admission.ration import COMPLETIONS_PER_UNIT, Ration
from router.admission.worker_queue import Place, Waiting, WorkerQueue
from router.answering.hop import Loss
from router.answering.request import OpenRequest
from router.asking.spec import RequestSpec
from router.config import RouterSettings
from router.fleet.health.ejection import admitted
from router.fleet.link import WorkerLink
from router.fleet.policies.policy import Policy, Work
from router.fleet.quarantine import Quarantine
from router.fleet.retries import Retries
from router.fleet.retry_budget import RetryBudget
from router.fleet.session import Session
from router.fleet.versions import line_of
from router.fleet.workers import WorkerSet
from router.metrics import RouterMetrics
from router.model.served import Version

logger = logging.getLogger(__name__)

GUESSED_TOKENS = 128
"""Of an answer, until it is known how many they are."""
SENDING = 0.5
"""Units of the loop's ration, beside what each completion takes."""
COMPLETION_WEIGHT = 2.0
"""Of a token of an answer, against one of a prompt: it takes a step of its own."""

TimeLeft = Callable[[], float | None]
"""Seconds to the deadline; None: there is none."""


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Stateless but for the policy, the quarantine and the retry budget."""

    workers: WorkerSet
    policy: Policy
    settings: RouterSettings
    metrics: RouterMetrics
    queue: WorkerQueue
    ration: Ration
    quarantine: Quarantine = field(default_factory=Quarantine)
    retry_budget: RetryBudget = field(default_factory=RetryBudget)

    def dispatched(self, requests: Sequence[OpenRequest], time_left: TimeLeft) -> AbstractAsyncContextManager[None]:
        """While its block lasts, the requests are on workers or on their way to one; what cannot be helped fails them.
        Raises InvalidArgumentError for one that is too large for a worker, ResourceExhaustedError where too many wait.
        """
        return Journeys([_Journey(self, request, time_left) for request in requests])


class Journeys(AbstractAsyncContextManager[None]):
    """Of one call."""

    __slots__ = ("_journeys",)

    def __init__(self, journeys: Sequence["_Journey"]) -> None:
        self._journeys = journeys

    async def __aenter__(self) -> None:
        try:
            for number, journey in enumerate(self._journeys):
                if number or journey.is_large:  # else the call's turn was for this, too
                    await journey.turn_of_loop()
                journey.begin()
        except BaseException:
            await self._end()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        """One after the other, in turns of the loop that have room for them: a call may have 4,096 sequences to abort.
        Whoever is cancelled once more meanwhile ends the rest at once."""
        left = deque(self._journeys)
        try:
            while left:
                left.popleft().end()
                if left:
                    await left[0].turn_of_loop()
        finally:
            for journey in left:
                journey.end()


class _Journey:
    """Of one request. It moves by itself: whoever waits for its answer need not know."""

    def __init__(self, dispatcher: Dispatcher, request: OpenRequest, time_left: TimeLeft) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._time_left = time_left
        self._retries = Retries(dispatcher.settings.max_retries, dispatcher.retry_budget)
        self._session: Session = Session("", 0)
        """Where it is or was last."""
        self._loss: Loss | None = None
        """The last one."""
        self._search: asyncio.Task[None] | None = None
        self._place: Place | None = None
        """In the queue for workers, and then on one."""
        self._links: Sequence[WorkerLink] = ()
        """It may go to now, as `_has_room` saw them; none where there is no worker at all."""
        self._began = time.monotonic()
        self._queueing: Span | None = None
        """While it waits there."""

    @property
    def is_large(self) -> bool:
        return self._request.spec.n > COMPLETIONS_PER_UNIT

    async def turn_of_loop(self) -> None:
        """That has room for what it costs to send it."""
        await self._dispatcher.ration.granted(self._request.news.client, _units(self._request.spec))

    def begin(self) -> None:
        """At once where there is room on a worker, or no worker at all."""
        self._dispatcher.retry_budget.request_begins()
        spec = self._request.spec
        self._place = self._dispatcher.queue.enter(
            line_of(spec.model, spec.version, spec.dp_rank),
            self._request.news.client,
            Waiting(self._has_room, self._go, self._request.fail, _units(spec)),
            cost=_cost(spec, spec.n * min(spec.max_tokens or GUESSED_TOKENS, GUESSED_TOKENS)),
            priority=spec.priority,
            time_left=self._time_left(),
        )
        if self._place.is_waiting:
            self._queueing = self._request.trace.queueing()

    def _has_room(self) -> bool:
        links = self._candidates()
        self._links = with_room(links)
        return not links or bool(self._links)

    def _go(self) -> None:
        """The queue has asked `_has_room` in the same moment."""
        if self._request.error:
            return  # its deadline has passed; it is about to end
        self._dispatcher.metrics.queued(self._request.spec.model, time.monotonic() - self._began)
        if self._queueing:
            self._queueing.end({})
        links, self._links = self._links, ()
        if not links:
            self._search = asyncio.create_task(self._find_worker())
            return
        try:
            self._put_on(links)
        except FissileError as error:
            self._request.fail(error)
        except Exception as error:
            self._request.crash(error)

    def end(self) -> None:
        if self._search:
            self._search.cancel()
        if self._place:
            cost = _cost(self._request.spec, self._request.num_completion_tokens)
            self._dispatcher.queue.leave(self._place, cost)
            self._place = None  # it leads back here
        if self._queueing:
            self._queueing.end({}, error="it came to no worker")
        self._request.close()

    def _candidates(self) -> Sequence[WorkerLink]:
        """Available now, less the outliers: of the version that was chosen and of equal ones; where there are none, of
        those that can stand in for it."""
        spec, has_begun = self._request.spec, self._request.has_begun
        return self._candidates_of(spec.is_meant_for) or self._candidates_of(
            lambda version: spec.may_go_to(version, has_begun=has_begun)
        )

    def _candidates_of(self, is_wanted: Callable[[Version], bool]) -> Sequence[WorkerLink]:
        spec = self._request.spec
        links = self._dispatcher.workers.candidates(spec.model, is_wanted, spec.dp_rank)
        return admitted([link for link in links if link.session not in self._retries.failed])

    def _put_on(self, links: Sequence[WorkerLink]) -> None:
        choice = self._dispatcher.policy.choose(_work(self._request), links)
        link: WorkerLink = choice.worker
        self._session = link.session
        self._request.put_on(
            link,
            self._dispatcher.settings.first_token_timeout,
            self._time_left(),
            self._move,
            num_cached_tokens=choice.num_cached_tokens,
        )
        if self._retries.is_suspect:
            self._dispatcher.quarantine.put_on(link.session, self._request)

    def _move(self, loss: Loss) -> None:
        """Called by the request."""
        spec = self._request.spec
        self._loss = loss
        try:
            self._retries.count(self._session, loss, self._request.num_completion_tokens)
        except FissileError as error:
            if isinstance(error, InternalError):
                logger.error("request %s: %s", spec.request_id, error.message)
            self._request.fail(error)
            return
        logger.info("request %s moves: %s", spec.request_id, loss.detail)
        self._dispatcher.metrics.moved(spec.model)
        self._search = asyncio.create_task(self._find_worker())

    async def _find_worker(self) -> None:
        """On which the request has not failed; waits a bounded time for one."""
        worker_wait = self._dispatcher.settings.worker_wait
        await self.turn_of_loop()
        try:
            async with asyncio.timeout(worker_wait):
                with self._request.trace.finding_worker():
                    links = await self._wait_for_candidates()
            if not self._request.error:
                self._put_on(links)
        except TimeoutError:
            self._request.fail(UnavailableError(self._why_none(worker_wait), retry_after=1.0))
        except FissileError as error:
            self._request.fail(error)
        except Exception as error:
            self._request.crash(error)

    def _why_none(self, waited: float) -> str:
        spec = self._request.spec
        is_other = bool(self._dispatcher.workers.candidates(spec.model, lambda version: version != spec.version))
        which = " that can stand in for the version that it was made for" if is_other else ""
        why = f"; the last one: {self._loss.detail}" if self._loss else ""
        return f"no healthy worker for {spec.model}{which} within {waited:g} s{why}"

    async def _wait_for_candidates(self) -> Sequence[WorkerLink]:
        """For a suspect those without another one, if it comes to that soon. Raises the last worker's refusal if there
        is no other."""
        while True:
            is_suspect = self._retries.is_suspect
            links = await self._dispatcher.quarantine.turn(self._candidates) if is_suspect else self._candidates()
            if links:
                return links
            if self._loss and self._loss.refusal:
                raise self._loss.refusal
            await self._dispatcher.workers.wait_for_change()
            await self.turn_of_loop()


def with_room(links: Sequence[WorkerLink]) -> list[WorkerLink]:
    """Those that a newcomer may go to at once. While some worker has a place, none that runs as many sequences as it
    can is among them: here the newcomer waits some steps for that place, there until another sequence ends."""
    has_place = any(link.load.has_place for link in links)
    return [link for link in links if link.has_room and (link.load.has_place or not has_place)]


def _units(spec: RequestSpec) -> float:
    """Of the loop's ration, to choose a worker and send it there."""
    return SENDING + spec.n / COMPLETIONS_PER_UNIT


def _cost(spec: RequestSpec, num_completion_tokens: int) -> float:
    """Of a client's share."""
    return len(spec.prompt.token_ids) + COMPLETION_WEIGHT * num_completion_tokens


def _work(request: OpenRequest) -> Work:
    spec = request.spec
    return Work(
        spec.prompt.token_ids,
        spec.cache_salt,
        spec.routing_key,
        num_generated=request.num_completion_tokens,
        reads_cache=not spec.wants_prompt_logprobs,
    )
