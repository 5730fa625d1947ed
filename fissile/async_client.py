"""The client for asyncio; the same calls as `fissile.client`."""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from fissile import requests, responses
from fissile.channel import aio_channel, call_metadata
from fissile.errors import CancelledError, UnavailableError, from_rpc_error
from fissile.options import Options
from fissile.requests import Message, Prompt, Tool, ToolChoice
from fissile.results import Delta, Generation, Model, Stats, Token
from fissile.routers import ANSWER_SECONDS, Calls, Method, Routers, no_answer
from fissile.tls import ClientTls
from fissile.trace_context import trace_metadata
from fissile.v1 import generation_pb2


class AsyncStream(AsyncIterator[Delta]):
    """An answer that is being generated: iterate over its deltas, or ask for the `result`.

    Closing it, leaving its `async with` block cancels the request: the worker frees its memory within a step.
    Errors arrive as `fissile.errors.FissileError` from the iteration.
    """

    def __init__(self, calls: Calls, cumulative: bool) -> None:
        self._calls = calls
        self._begin(calls.first())
        self._collector = responses.Collector(cumulative=cumulative)
        self._ready: deque[Delta] = deque()
        self._generation: Generation | None = None

    async def __anext__(self) -> Delta:
        while not self._ready:
            try:
                message = await self._receive()
            except StopAsyncIteration:
                self._calls.ended()
                self._generation = self._collector.generation()
                raise
            except grpc.RpcError as error:
                self._begin(self._calls.after(from_rpc_error(error)))
                continue
            except asyncio.CancelledError:
                if _is_cancelled_itself():
                    raise
                # gRPC says so of a call that was cancelled: to the caller's task it would look like its own end.
                self._calls.ended()
                raise CancelledError("the stream or its client was closed") from None
            except UnavailableError as error:
                self._begin(self._calls.after(error))
                continue
            self._calls.answered()
            self._ready.extend(self._collector.add(message))
        return self._ready.popleft()

    def _begin(self, call: Any) -> None:
        self._call, self._messages = call, aiter(call)

    async def _receive(self) -> Any:
        """The next message. While there is another router to ask, this one must answer soon."""
        if not self._calls.is_last:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._call.initial_metadata()
            except TimeoutError:
                self._call.cancel()
                raise no_answer() from None
        return await anext(self._messages)

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
        self._calls.ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _is_cancelled_itself() -> bool:
    """Whether it is this task that somebody cancels."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncClient:
    """Calls to a router, over as many connections as they need. For one event loop.

    `model` may be left empty everywhere while the router serves one model. `timeout` is in seconds and travels to the
    worker's scheduler; None waits for ever. `api_key` is shown where the router wants one; use TLS with it. `address`
    may be several: a call goes on to the next router when one cannot be reached or is UNAVAILABLE, while nothing of
    the answer has come.
    """

    def __init__(
        self, address: str | Sequence[str] = "localhost:50051", *, tls: ClientTls | None = None, api_key: str = ""
    ) -> None:
        self._metadata = call_metadata(api_key)
        self._routers = Routers(address, aio_channel, tls)
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

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
        raises what goes wrong. Raises InvalidArgumentError, which names the argument, for what
        no message can hold; TypeError for an option that there is not."""
        request = requests.generate_request(
            prompt, model=model, request_id=request_id, add_special_tokens=add_special_tokens, options=options
        )
        return self._stream(lambda stub: stub.Generate, request, timeout)

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
        return self._stream(lambda stub: stub.Chat, request, timeout)

    async def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool = True, timeout: float | None = None
    ) -> tuple[Token, ...]:
        """The tokens of `text`, each with its bytes. `model`: an id, not needed while the router serves one model."""
        request = requests.tokenize_request(text, model=model, add_special_tokens=add_special_tokens)
        return responses.tokens(await self._call(lambda stub: stub.Tokenize, request, timeout))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str:
        """The text of these tokens."""
        request = requests.detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        response: generation_pb2.DetokenizeResponse = await self._call(lambda stub: stub.Detokenize, request, timeout)
        return response.text

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """All models that the router serves, in order of id."""
        response = await self._call(lambda stub: stub.ListModels, generation_pb2.ListModelsRequest(), timeout)
        return tuple(responses.model(entry) for entry in response.models)

    async def stats(self, *, window: int = 0, timeout: float | None = None) -> Stats:
        """Latencies of the last `window` seconds (0: all that the router keeps), counters, and each worker's state."""
        request = requests.stats_request(window)
        return responses.stats(await self._call(lambda stub: stub.GetStats, request, timeout))

    def _stream(self, method: Method, request: Any, timeout: float | None) -> AsyncStream:
        metadata = [*self._metadata, *trace_metadata()]
        calls = Calls(self._routers, method, request, timeout, metadata)
        stream = AsyncStream(calls, request.options.output.cumulative)
        self._streams.add(stream)
        return stream

    async def _call(self, method: Method, request: Any, timeout: float | None) -> Any:
        calls = Calls(self._routers, method, request, timeout, self._metadata)
        call = calls.first()
        while True:
            try:
                response = await call
            except grpc.RpcError as error:
                call = calls.after(from_rpc_error(error))
            except asyncio.CancelledError:
                if _is_cancelled_itself():
                    raise
                raise CancelledError("the client was closed") from None
            else:
                calls.answered()
                return response

    async def close(self) -> None:
        """Close the connections: streams end in CancelledError, later calls in FailedPreconditionError. Idempotent."""
        channels = self._routers.close()
        for stream in self._streams:
            stream.close()  # an older gRPC closes a channel and lets its streams go on
        for opened in channels:
            await opened.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
