"""The client for asyncio; the same calls as `fissile.client`."""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from fissile import requests, responses
from fissile.address import router_target
from fissile.channel import aio_channel, call_metadata
from fissile.errors import from_rpc_error
from fissile.options import Options
from fissile.requests import Message, Prompt, Tool, ToolChoice
from fissile.results import Delta, Generation, Model, Stats, Token
from fissile.tls import ClientTls
from fissile.trace_context import trace_metadata
from fissile.v1 import generation_pb2, generation_pb2_grpc

R = TypeVar("R")


class AsyncStream(AsyncIterator[Delta]):
    """An answer that is being generated: iterate over its deltas, or ask for the `result`.

    Closing it, leaving its `async with` block cancels the request: the worker frees its memory within a step.
    Errors arrive as `fissile.errors.FissileError` from the iteration.
    """

    def __init__(self, call: Any, cumulative: bool) -> None:
        self._call = call
        self._messages = aiter(call)
        self._collector = responses.Collector(cumulative=cumulative)
        self._ready: deque[Delta] = deque()
        self._generation: Generation | None = None

    async def __anext__(self) -> Delta:
        while not self._ready:
            try:
                message = await anext(self._messages)
            except StopAsyncIteration:
                self._generation = self._collector.generation()
                raise
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
            self._ready.extend(self._collector.add(message))
        return self._ready.popleft()

    @property
    def request_id(self) -> str:
        """Known once the first message is there; empty before."""
        return self._collector.request_id

    async def result(self) -> Generation:
        """Wait for the end and return the whole answer, deltas already taken included."""
        async for _ in self:
            pass
        assert self._generation is not None
        return self._generation

    def close(self) -> None:
        """Cancel the request. Idempotent; does nothing after the end."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """A connection to a router, for one event loop.

    `model` may be left empty everywhere while the router serves one model. `timeout` is in seconds and travels to the
    worker's scheduler; None waits for ever. `api_key` is shown where the router wants one; use TLS with it.
    """

    def __init__(self, address: str = "localhost:50051", *, tls: ClientTls | None = None, api_key: str = "") -> None:
        self._metadata = call_metadata(api_key)
        self._channel = aio_channel(router_target(address), tls)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        model: str = "",
        request_id: str = "",
        add_special_tokens: bool = True,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Continue a prompt, given as text or as token ids, or a list of such prompts. Returns at once; the stream
        raises what goes wrong. Raises TypeError or ValueError for arguments that no message can hold."""
        request = requests.generate_request(
            prompt, model=model, request_id=request_id, add_special_tokens=add_special_tokens, options=options
        )
        return AsyncStream(
            self._stub.Generate(request, timeout=timeout, metadata=[*self._metadata, *trace_metadata()]),
            request.options.output.cumulative,
        )

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = "",
        request_id: str = "",
        continue_final_message: bool = False,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        chat_template: str = "",
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Answer a conversation through the model's chat template. `tool_choice` says what it must
        do with `tools`. `template_arguments` are the template's variables; `chat_template` replaces it, where the
        router allows that. Returns and raises as `generate` does."""
        request = requests.chat_request(
            messages,
            model=model,
            request_id=request_id,
            continue_final_message=continue_final_message,
            tools=tools,
            tool_choice=tool_choice,
            template_arguments=template_arguments or {},
            chat_template=chat_template,
            options=options,
        )
        return AsyncStream(
            self._stub.Chat(request, timeout=timeout, metadata=[*self._metadata, *trace_metadata()]),
            request.options.output.cumulative,
        )

    async def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool = True, timeout: float | None = None
    ) -> tuple[Token, ...]:
        request = generation_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return responses.tokens(await self._call(self._stub.Tokenize, request, timeout))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str:
        request = generation_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        response: generation_pb2.DetokenizeResponse = await self._call(self._stub.Detokenize, request, timeout)
        return response.text

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """All models that the router serves, in order of id."""
        response = await self._call(self._stub.ListModels, generation_pb2.ListModelsRequest(), timeout)
        return tuple(responses.model(entry) for entry in response.models)

    async def stats(self, *, window: int = 0, timeout: float | None = None) -> Stats:
        """Latencies of the last `window` seconds (0: all that the router keeps), counters, and each worker's state."""
        request = generation_pb2.GetStatsRequest(window_seconds=window)
        return responses.stats(await self._call(self._stub.GetStats, request, timeout))

    async def _call(self, method: Callable[..., Awaitable[R]], request: object, timeout: float | None) -> R:
        try:
            return await method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def close(self) -> None:
        """Close the connection; open streams are cancelled. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
