"""The blocking client. `fissile.async_client` has the same for asyncio."""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from fissile import requests, responses
from fissile.channel import call_metadata, channel
from fissile.errors import UnavailableError, from_rpc_error
from fissile.options import Options
from fissile.requests import Message, Prompt, Tool, ToolChoice
from fissile.results import Delta, Generation, Model, Stats, Token
from fissile.routers import ANSWER_SECONDS, Calls, Method, Routers, no_answer
from fissile.tls import ClientTls
from fissile.trace_context import trace_metadata
from fissile.v1 import generation_pb2


class Stream(Iterator[Delta]):
    """An answer that is being generated: iterate over its deltas, or ask for the `result`.

    Closing it, leaving its `with` block or dropping it cancels the request: the worker frees its memory within a step.
    Errors arrive as `fissile.errors.FissileError` from the iteration.
    """

    def __init__(self, calls: Calls, cumulative: bool) -> None:
        self._calls = calls
        self._call = calls.first()
        self._collector = responses.Collector(cumulative=cumulative)
        self._ready: deque[Delta] = deque()
        self._generation: Generation | None = None

    def __next__(self) -> Delta:
        while not self._ready:
            try:
                message = self._receive()
            except StopIteration:
                self._calls.ended()
                self._generation = self._collector.generation()
                raise
            except grpc.RpcError as error:
                self._call = self._calls.after(from_rpc_error(error))
                continue
            except UnavailableError as error:
                self._call = self._calls.after(error)
                continue
            self._calls.answered()
            self._ready.extend(self._collector.add(message))
        return self._ready.popleft()

    def _receive(self) -> Any:
        """The next message. While there is another router to ask, this one must answer soon."""
        if not self._calls.is_last:
            _wait_for_headers(self._call)
        return next(self._call)

    @property
    def request_id(self) -> str:
        """Known once the first message is there; empty before."""
        return self._collector.request_id

    def result(self) -> Generation:
        """Wait for the end and return the whole answer, deltas already taken included."""
        for _ in self:
            pass
        assert self._generation is not None
        return self._generation

    def close(self) -> None:
        """Cancel the request. Idempotent; does nothing after the end."""
        self._call.cancel()
        self._calls.ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _wait_for_headers(call: Any) -> None:
    """Raises UnavailableError if they do not come in time. gRPC waits for them without end only."""
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        call.cancel()

    timer = threading.Timer(ANSWER_SECONDS, give_up)
    timer.start()
    try:
        call.initial_metadata()
    finally:
        timer.cancel()
    if is_late.is_set():
        raise no_answer()


class Client:
    """Calls to a router, over as many connections as they need. Thread-safe: share one among threads.

    `model` may be left empty everywhere while the router serves one model. `timeout` is in seconds and travels to the
    worker's scheduler; None waits for ever. `api_key` is shown where the router wants one; use TLS with it. `address`
    may be several: a call goes on to the next router when one cannot be reached or is UNAVAILABLE, while nothing of
    the answer has come.
    """

    def __init__(
        self, address: str | Sequence[str] = "localhost:50051", *, tls: ClientTls | None = None, api_key: str = ""
    ) -> None:
        self._metadata = call_metadata(api_key)
        self._routers = Routers(address, channel, tls)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        model: str = "",
        request_id: str = "",
        add_special_tokens: bool = True,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Stream:
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
    ) -> Stream:
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

    def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool = True, timeout: float | None = None
    ) -> tuple[Token, ...]:
        """The tokens of `text`, each with its bytes. `model`: an id, not needed while the router serves one model."""
        request = requests.tokenize_request(text, model=model, add_special_tokens=add_special_tokens)
        return responses.tokens(self._call(lambda stub: stub.Tokenize.future, request, timeout))

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str:
        """The text of these tokens."""
        request = requests.detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        response: generation_pb2.DetokenizeResponse = self._call(lambda stub: stub.Detokenize.future, request, timeout)
        return response.text

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """All models that the router serves, in order of id."""
        response = self._call(lambda stub: stub.ListModels.future, generation_pb2.ListModelsRequest(), timeout)
        return tuple(responses.model(entry) for entry in response.models)

    def stats(self, *, window: int = 0, timeout: float | None = None) -> Stats:
        """Latencies of the last `window` seconds (0: all that the router keeps), counters, and each worker's state."""
        request = requests.stats_request(window)
        return responses.stats(self._call(lambda stub: stub.GetStats.future, request, timeout))

    def _stream(self, method: Method, request: Any, timeout: float | None) -> Stream:
        metadata = [*self._metadata, *trace_metadata()]
        calls = Calls(self._routers, method, request, timeout, metadata)
        return Stream(calls, request.options.output.cumulative)

    def _call(self, method: Method, request: Any, timeout: float | None) -> Any:
        calls = Calls(self._routers, method, request, timeout, self._metadata)
        call = calls.first()
        while True:
            try:
                response = call.result()
            except grpc.RpcError as error:
                call = calls.after(from_rpc_error(error))
            else:
                calls.answered()
                return response

    def close(self) -> None:
        """Close the connections: streams end in CancelledError, later calls in FailedPreconditionError. Idempotent."""
        for opened in self._routers.close():
            opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
