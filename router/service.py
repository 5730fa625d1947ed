"""GenerationService on gRPC: hands calls to the `GenerationApi`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message

from common.server import abort
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


class GenerationService(GenerationServiceServicer):
    """Streams send their initial metadata at once: a quiet one must not look like a dead server."""

    def __init__(self, api: GenerationApi, callers: Callers, readers: Readers) -> None:
        self._api = api
        self._callers = callers
        self._readers = readers

    async def Generate(self, request: GenerateRequest, context: Context) -> None:  # type: ignore[override]
        caller = self._caller(context)
        answers = self._api.generate(request, caller, context.time_remaining, _traceparent(context))
        await self._send(answers, caller, context)

    async def Chat(self, request: ChatRequest, context: Context) -> None:  # type: ignore[override]
        caller = self._caller(context)
        answers = self._api.chat(request, caller, context.time_remaining, _traceparent(context))
        await self._send(answers, caller, context)

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

    async def _send(self, answers: AsyncGenerator[Message], caller: Caller, context: Context) -> None:
        """Written, not yielded to gRPC: each layer between would need a generator that every message goes through."""
        await context.send_initial_metadata(())
        answer: Message | None = None
        try:
            async with aclosing(answers):
                try:
                    async with self._readers.watched() as reader:
                        async for answer in answers:
                            reader.begin()
                            await context.write(answer)
                            reader.end()
                except StalledReaderError as error:
                    await answers.athrow(error)
        except StalledReaderError as error:
            with self._readers.lingering(caller.name, answer.ByteSize() if answer else 0):
                await abort(context, error, "a stream")


def _traceparent(context: Context) -> str:
    """The last one: whoever is nearer to the wire has added its own."""
    headers = [value for key, value in context.invocation_metadata() if key == TRACEPARENT]
    return valid_traceparent(headers[-1]) if headers else ""
