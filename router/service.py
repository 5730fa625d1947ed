"""GenerationService on gRPC: hands calls to the `GenerationApi`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Self

from google.protobuf.message import Message

from common.calls import abort
from common.tracing import TRACEPARENT, valid_traceparent
from fissile.v1 import (
    ChatRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerationServiceServicer,
    GetModelRequest,
    GetModelResponse,
    GetStatsRequest,
    GetStatsResponse,
    ListModelsRequest,
    ListModelsResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from router.admission.readers import Readers, StalledReaderError
from router.api import GenerationApi
from router.callers.caller import Caller
from router.callers.callers import Callers

Context = Any  # grpc.aio.ServicerContext, which has no types

HEADERS_SECONDS = 1.0
"""Clients with several routers go on to the next one when none have come within `ANSWER_SECONDS`."""


class GenerationService(GenerationServiceServicer):
    def __init__(self, api: GenerationApi, callers: Callers, readers: Readers) -> None:
        self._api = api
        self._callers = callers
        self._readers = readers

    async def Generate(self, request: GenerateRequest, context: Context) -> Message:  # type: ignore[override]
        caller = self._caller(context)
        answers = self._api.generate(request, caller, context.time_remaining, _traceparent(context))
        return await self._send(answers, caller, context)

    async def Chat(self, request: ChatRequest, context: Context) -> Message:  # type: ignore[override]
        caller = self._caller(context)
        answers = self._api.chat(request, caller, context.time_remaining, _traceparent(context))
        return await self._send(answers, caller, context)

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        return await self._api.tokenize(request, self._caller(context))

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        return await self._api.detokenize(request, self._caller(context))

    async def GetModel(self, request: GetModelRequest, context: Context) -> GetModelResponse:
        return await self._api.get_model(request, self._caller(context))

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        return await self._api.list_models(request, self._caller(context))

    async def GetStats(self, request: GetStatsRequest, context: Context) -> GetStatsResponse:
        return await self._api.get_stats(request, self._caller(context))

    def _caller(self, context: Context) -> Caller:
        return self._callers.of_call(context)

    async def _send(self, answers: AsyncGenerator[Message], caller: Caller, context: Context) -> Message:
        """Written, not yielded to gRPC: each layer between would need a generator that every message goes through. The
        last one, which has the usage, is returned: gRPC sends it together with the status, and with the headers of an
        answer that has no other."""
        answer: Message | None = None
        try:
            async with aclosing(answers), Headers(context) as headers:
                try:
                    async with self._readers.watched() as reader:
                        async for answer in answers:
                            if answer.HasField("usage"):
                                continue
                            if not headers.are_sent:
                                await headers.send()
                            reader.begin()
                            await context.write(answer.SerializeToString())
                            reader.end()
                except StalledReaderError as error:
                    await answers.athrow(error)
        except StalledReaderError as error:
            with self._readers.lingering(caller.name, answer.ByteSize() if answer else 0):
                await abort(context, error, "a stream")
        assert answer is not None, "an answer has a last message"
        self._readers.ends(caller.name, answer.ByteSize())
        return answer


class Headers:
    """The initial metadata of a stream: sent before a first message that is not the last one, or when it has been quiet
    for HEADERS_SECONDS, lest it look like a dead server. Not at once: gRPC's own retries (a client's `retryPolicy`) are
    for calls that end without any, as one does that is refused within the block."""

    def __init__(self, context: Context) -> None:
        self.are_sent = False
        self._context = context
        self._sending: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(HEADERS_SECONDS, self._begin)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Nobody ends the call while they are on their way: gRPC would send them once more."""
        self._timer.cancel()
        if self._sending is not None and not self.are_sent:
            await self._sending

    async def send(self) -> None:
        """Once, by whoever is about to write."""
        self._timer.cancel()
        await (self._sending or self._context.send_initial_metadata(()))
        self.are_sent = True

    def _begin(self) -> None:
        self._sending = asyncio.ensure_future(self._context.send_initial_metadata(()))


def _traceparent(context: Context) -> str:
    """The last one: whoever is nearer to the wire has added its own."""
    headers = [value for key, value in context.invocation_metadata() if key == TRACEPARENT]
    return valid_traceparent(headers[-1]) if headers else ""
