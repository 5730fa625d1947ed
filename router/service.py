"""GenerationService on gRPC: hands calls to the `GenerationApi`."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fissile.v1 import (
    ChatRequest,
    ChatResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
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
from router.api import GenerationApi

Context = Any  # grpc.aio.ServicerContext, which has no types


class GenerationService(GenerationServiceServicer):
    """Streams send their initial metadata at once: a quiet one must not look like a dead server."""

    def __init__(self, api: GenerationApi) -> None:
        self._api = api

    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateResponse]:
        await context.send_initial_metadata(())
        async with aclosing(self._api.generate(request, context.time_remaining)) as answers:
            async for answer in answers:
                yield answer

    async def Chat(self, request: ChatRequest, context: Context) -> AsyncIterator[ChatResponse]:
        await context.send_initial_metadata(())
        async with aclosing(self._api.chat(request, context.time_remaining)) as answers:
            async for answer in answers:
                yield answer

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        return await self._api.tokenize(request)

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        return await self._api.detokenize(request)

    async def GetModel(self, request: GetModelRequest, context: Context) -> GetModelResponse:
        return await self._api.get_model(request)

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        return await self._api.list_models(request)

    async def GetStats(self, request: GetStatsRequest, context: Context) -> GetStatsResponse:
        return await self._api.get_stats(request)
