"""What the router offers, apart from any transport: requests in, responses out, one typed error where there is none.

`service.py` puts it on gRPC, `http/` on HTTP. Both speak the messages of the contract.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from common.bounds import MAX_PROMPTS
from common.tracing import Tracer
from fissile.errors import FissileError, PermissionDeniedError
from fissile.v1 import (
    ChatRequest,
    ChatResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    GetModelRequest,
    GetModelResponse,
    GetStatsRequest,
    GetStatsResponse,
    ListModelsRequest,
    ListModelsResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from router.account import Account
from router.admission.admission import Admission
from router.admission.ration import COMPLETIONS_PER_UNIT
from router.admission.turns import LARGE_BYTES
from router.admission.unread import UnreadBytes
from router.answering import responses
from router.answering.answer import Answer
from router.answering.heartbeats import Heartbeats
from router.answering.pacing import News, Pacer
from router.answering.parts import parts
from router.answering.request import OpenRequest
from router.answering.trace import RequestTrace
from router.answering.update import Update
from router.asking.validation import check_counts, held_bytes
from router.callers.caller import Caller
from router.callers.quotas import Quotas
from router.config import RouterSettings
from router.fleet import reports
from router.fleet.dispatch import Dispatcher, TimeLeft
from router.fleet.workers import WorkerSet
from router.latency import WINDOW_SECONDS
from router.metrics import RouterMetrics
from router.model.served import ServedModel, ServedVersion
from router.model.tokenizer import Tokenizer
from router.open_requests import OpenRequests
from router.specs import SpecMaker
from router.timers import deadline_timer

R = TypeVar("R", GenerateResponse, ChatResponse)

_ENDS = {reason: name.removeprefix("FINISH_REASON_").lower() for name, reason in FinishReason.items()}
"""As metrics name them."""


def no_deadline() -> float | None:
    return None


class GenerationApi:
    """All state is in the parts; see `router.parts`. Methods raise FissileError.

    `caller` is who asks, as the front found out; `time_left` says how many seconds a request has; `traceparent` which
    span it belongs to, if any; an iterator that is closed early ends its request.
    """

    def __init__(
        self,
        settings: RouterSettings,
        workers: WorkerSet,
        dispatcher: Dispatcher,
        open_requests: OpenRequests,
        admission: Admission,
        metrics: RouterMetrics,
        pacer: Pacer,
        tracer: Tracer,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._specs = SpecMaker(settings, workers, admission.queue)
        self._dispatcher = dispatcher
        self._open = open_requests
        self.admission = admission
        self._metrics = metrics
        self._pacer = pacer
        self._quotas = Quotas()
        self._tracer = tracer
        self._heartbeats = Heartbeats()

    def generate(
        self, request: GenerateRequest, caller: Caller, time_left: TimeLeft = no_deadline, traceparent: str = ""
    ) -> AsyncGenerator[GenerateResponse]:
        account = self._account(request, caller, "text_completion", traceparent)
        return self._run(request, caller, time_left, account, responses.generate_response)

    def chat(
        self, request: ChatRequest, caller: Caller, time_left: TimeLeft = no_deadline, traceparent: str = ""
    ) -> AsyncGenerator[ChatResponse]:
        account = self._account(request, caller, "chat", traceparent)
        return self._run(request, caller, time_left, account, responses.chat_response)

    def _account(
        self, request: GenerateRequest | ChatRequest, caller: Caller, operation: str, traceparent: str
    ) -> Account:
        return Account(request.request_id, request.model, caller.name, operation, self._tracer, traceparent)

    async def _run(
        self,
        request: GenerateRequest | ChatRequest,
        caller: Caller,
        time_left: TimeLeft,
        account: Account,
        response: Callable[[str, Update], R],
    ) -> AsyncGenerator[R]:
        """The one way of a request, from arrival to its end. Whatever ends it is counted and leaves nothing behind."""
        request_id = account.request_id
        try:
            check_counts(request)
            num_prompts = _num_prompts(request)
            with (
                self._open.place(request_id, caller.name, num_prompts),
                self.admission.held_bytes.taken(caller.name, held_bytes(request)),
                self._quotas.opened(caller, num_prompts) as tab,
            ):
                opened = await self._prepared(request, caller, account)
                tab.take_prompt(_num_prompt_tokens(opened), lambda: _num_generated(opened))
                self._open.add(request_id, caller.name, opened)
                async with self._dispatcher.dispatched(opened, time_left):
                    with (
                        deadline_timer(opened, time_left()),
                        self._heartbeats.counted(caller.name, opened[0].spec.heartbeat) as silence,
                    ):
                        answer = Answer(opened, silence)
                        is_answered = False
                        while not is_answered:
                            update = await answer.next()
                            if update.usage:
                                is_answered, account.end = True, _end_of(opened[0])
                            for part in parts(update, cumulative=opened[0].spec.cumulative):
                                yield response(request_id, part)
        except FissileError as error:
            account.end = error.code.name.lower()
            raise
        except Exception:
            account.end = "internal"
            raise
        finally:
            account.close(self._metrics)

    async def _prepared(
        self, request: GenerateRequest | ChatRequest, caller: Caller, account: Account
    ) -> list[OpenRequest]:
        """Validated, tokenised, with every default filled in; one for each prompt."""
        caller.check_priority(request.options.priority)
        model = await self._model(request.model, caller)
        account.served_by(model.id)
        salt = caller.cache_salt(request.options.cache_salt)
        with account.part("wait for turn") as waiting:
            async with self.admission.turns.turn(caller.name, request.ByteSize()):
                waiting.end({})
                with account.part("tokenise"):
                    served, specs = await self._specs.make(request, model, account.request_id, salt)
        news = News(caller.name)
        opened = []
        for number, spec in enumerate(specs):
            if number or spec.n > COMPLETIONS_PER_UNIT:  # else its turn was for this, too
                await self.admission.ration.granted(caller.name, spec.n / COMPLETIONS_PER_UNIT)
            opened.append(
                OpenRequest(
                    spec,
                    served.tokenizer,
                    account.watch.another(),
                    self._metrics,
                    self._pacer,
                    news,
                    self._unread_bytes(caller),
                    RequestTrace(self._tracer, account.span),
                )
            )
        account.opened(opened)
        return opened

    def _unread_bytes(self, caller: Caller) -> UnreadBytes:
        return UnreadBytes(self.admission.held_bytes, caller.name, self._settings.max_unread_bytes)

    async def _model(self, name: str, caller: Caller) -> ServedModel:
        return await self._workers.model(name, self._settings.worker_wait, caller)

    @asynccontextmanager
    async def _main(self, request: TokenizeRequest | DetokenizeRequest, caller: Caller) -> AsyncIterator[ServedVersion]:
        """Of its model, for the block, which is the caller's turn; the request is valid there."""
        with (
            self._quotas.opened(caller),
            self.admission.held_bytes.taken(caller.name, request.ByteSize()),
        ):
            model = await self._model(request.model, caller)
            async with self.admission.turns.turn(caller.name, request.ByteSize()):
                await self._specs.validate(request, model.main, model.max_model_len)
                yield model.main

    async def tokenize(self, request: TokenizeRequest, caller: Caller) -> TokenizeResponse:
        async with self._main(request, caller) as served:
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await served.tokenizer.encode(request.text, add_special_tokens=special)
            make = partial(_tokenized, served.tokenizer, ids)
            return await served.tokenizer.in_thread(make) if len(ids) >= LARGE_BYTES else make()

    async def detokenize(self, request: DetokenizeRequest, caller: Caller) -> DetokenizeResponse:
        async with self._main(request, caller) as served:
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            decode = partial(served.tokenizer.decode, request.token_ids, skip_special_tokens=skip)
            is_large = len(request.token_ids) >= LARGE_BYTES
            return DetokenizeResponse(text=await served.tokenizer.in_thread(decode) if is_large else decode())

    async def get_model(self, request: GetModelRequest, caller: Caller) -> GetModelResponse:
        return GetModelResponse(model=reports.model(await self._model(request.model, caller)))

    async def list_models(self, request: ListModelsRequest, caller: Caller) -> ListModelsResponse:
        models = self._workers.models_of(caller)
        return ListModelsResponse(models=[reports.model(models[name]) for name in sorted(models)])

    async def get_stats(self, request: GetStatsRequest, caller: Caller) -> GetStatsResponse:
        if caller.quota.models is not None:
            raise PermissionDeniedError("GetStats tells of all models and workers; this key is for some models")
        window = min(request.window_seconds or WINDOW_SECONDS, WINDOW_SECONDS)
        return await reports.stats(
            self._metrics,
            self._workers.links.values(),
            len(self._open),
            len(self.admission.queue),
            window,
            partial(self.admission.ration.granted, caller.name, 1.0),
        )


def _tokenized(tokenizer: Tokenizer, token_ids: list[int]) -> TokenizeResponse:
    """In parts: protobuf gives the event loop no time while it takes a list."""
    response = TokenizeResponse()
    for start in range(0, len(token_ids), LARGE_BYTES):
        part = token_ids[start : start + LARGE_BYTES]
        response.token_ids.extend(part)
        response.tokens.extend(tokenizer.token_bytes(part))
    return response


def _num_prompts(request: GenerateRequest | ChatRequest) -> int:
    """More than are allowed are refused later, by their field."""
    num_listed = len(request.prompts) if isinstance(request, GenerateRequest) else 0
    return min(max(1, num_listed), MAX_PROMPTS)


def _num_prompt_tokens(requests: Sequence[OpenRequest]) -> int:
    return sum(len(request.spec.prompt.token_ids) for request in requests)


def _num_generated(requests: Sequence[OpenRequest]) -> int:
    return sum(request.num_completion_tokens for request in requests)


def _end_of(request: OpenRequest) -> str:
    """How the first completion ended, as metrics name it."""
    finish = request.completions[0].finish
    return _ENDS[finish.reason if finish else FinishReason.FINISH_REASON_UNSPECIFIED]
