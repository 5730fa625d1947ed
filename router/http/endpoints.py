"""The two endpoints that generate, as ASGI applications. They raise FissileError as long as nothing has been sent."""

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from common.tracing import TRACEPARENT, valid_traceparent
from fissile.errors import FissileError, ResourceExhaustedError
from fissile.v1 import (
    ChatRequest,
    ChatResponse,
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    GetModelRequest,
    TokenizeRequest,
)
from router.admission.turns import LARGE_BYTES
from router.api import GenerationApi
from router.callers.caller import Caller
from router.http.answers import Envelope, Writer, join
from router.http.bodies import CompletionBody, GenerationBody, Prompt
from router.http.callers import caller_of
from router.http.chat import ChatWriter
from router.http.chat_body import ChatBody
from router.http.completions import CompletionWriter, Echo
from router.http.events import events, send_events
from router.http.field_names import FieldNames
from router.http.json_body import parse_body
from router.http.middleware import whole_body
from router.http.requests import chat_names, chat_request, completion_names, completion_request

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=GenerationBody)
R = TypeVar("R", GenerateRequest, ChatRequest)
M = TypeVar("M", GenerateResponse, ChatResponse)
T = TypeVar("T")

MAX_WHOLE_BYTES = 16 * 1024 * 1024
"""Of an answer that is no stream, before it becomes JSON. Log probabilities can be that many: as JSON they take ten
times as much memory, and seconds of a thread."""
KEEP_ALIVE_SECONDS = 10.0
"""A stream that is silent for so long sends a comment: proxies cut what seems dead, often after a minute."""


class Endpoint(ABC, Generic[B, R, M]):
    """What both do with a request and its answer."""

    body_type: type[B]
    id_prefix: str

    def __init__(self, api: GenerationApi, keep_alive: float = KEEP_ALIVE_SECONDS) -> None:
        self._api = api
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope)
        raw, caller = await whole_body(receive), caller_of(http)
        async with self._api.admission.turns.turn_if_large(caller.name, len(raw)):
            with _refusals_logged(scope["path"], self.body_type):
                body = await _made(partial(parse_body, raw, self.body_type), len(raw))
        names = self._names(body)
        try:
            model = body.model or (await self._api.get_model(GetModelRequest(), caller)).model.id
            envelope = Envelope(f"{self.id_prefix}-{uuid.uuid4().hex}", model, body.includes_usage)
            writer = await self._writer(body, envelope, caller)
            with _refusals_logged(scope["path"], self.body_type):
                request = await _made(partial(self._request, body, envelope.id), len(raw))
            answers = self._answers(request, caller, valid_traceparent(http.headers.get(TRACEPARENT, "")))
            await _Exchange(answers, writer, names, envelope.id, bool(body.stream)).respond(scope, receive, send)
        except FissileError as error:
            raise names.translate(error) from error

    @abstractmethod
    def _names(self, body: B) -> FieldNames: ...

    @abstractmethod
    async def _writer(self, body: B, envelope: Envelope, caller: Caller) -> Writer[M]: ...

    @abstractmethod
    def _request(self, body: B, request_id: str) -> R: ...

    @abstractmethod
    def _answers(self, request: R, caller: Caller, traceparent: str) -> AsyncGenerator[M]: ...


class Completions(Endpoint[CompletionBody, GenerateRequest, GenerateResponse]):
    """POST /v1/completions."""

    body_type, id_prefix = CompletionBody, "cmpl"

    def _names(self, body: CompletionBody) -> FieldNames:
        return completion_names(body)

    async def _writer(self, body: CompletionBody, envelope: Envelope, caller: Caller) -> CompletionWriter:
        echo = await self._echo(body, caller) if body.echo else None
        return CompletionWriter(envelope, 1 if body.n is None else body.n, body.logprobs, echo)

    def _request(self, body: CompletionBody, request_id: str) -> GenerateRequest:
        return completion_request(body, request_id, self._keep_alive)

    def _answers(self, request: GenerateRequest, caller: Caller, traceparent: str) -> AsyncGenerator[GenerateResponse]:
        return self._api.generate(request, caller, traceparent=traceparent)

    async def _echo(self, body: CompletionBody, caller: Caller) -> Echo:
        texts = [await self._text(body, prompt, caller) for prompt in body.prompt]
        first = await self._first_token(body, body.prompt[0], caller) if body.logprobs is not None else b""
        return Echo(texts, first)

    async def _text(self, body: CompletionBody, prompt: Prompt, caller: Caller) -> str:
        if isinstance(prompt, str):
            return prompt
        request = DetokenizeRequest(
            model=body.model, token_ids=prompt, skip_special_tokens=body.skip_special_tokens is not False
        )
        return (await self._api.detokenize(request, caller)).text

    async def _first_token(self, body: CompletionBody, prompt: Prompt, caller: Caller) -> bytes:
        data: bytes | None = None
        if isinstance(prompt, str):
            request = TokenizeRequest(
                model=body.model, text=prompt, add_special_tokens=body.add_special_tokens is not False
            )
            tokenized = await self._api.tokenize(request, caller)
            data, prompt = b"".join(tokenized.tokens[:1]), tokenized.token_ids[:1]
        visible = DetokenizeRequest(model=body.model, token_ids=prompt[:1], skip_special_tokens=False)
        text = (await self._api.detokenize(visible, caller)).text.encode()
        # A token may stand for less at the beginning of a text; part of a character is no text at all.
        return text if data in (None, b" " + text) else data


class Chat(Endpoint[ChatBody, ChatRequest, ChatResponse]):
    """POST /v1/chat/completions."""

    body_type, id_prefix = ChatBody, "chatcmpl"

    def _names(self, body: ChatBody) -> FieldNames:
        return chat_names(body)

    async def _writer(self, body: ChatBody, envelope: Envelope, caller: Caller) -> ChatWriter:
        return ChatWriter(envelope, (body.top_logprobs or 0) if body.logprobs else None)

    def _request(self, body: ChatBody, request_id: str) -> ChatRequest:
        return chat_request(body, request_id, self._keep_alive)

    def _answers(self, request: ChatRequest, caller: Caller, traceparent: str) -> AsyncGenerator[ChatResponse]:
        return self._api.chat(request, caller, traceparent=traceparent)


async def _made(make: Callable[[], T], num_bytes: int) -> T:
    """What `make` returns; of something large by a thread, so that the event loop is held for no longer than a call of
    `json` or pydantic lets nothing else run."""
    return make() if num_bytes < LARGE_BYTES else await asyncio.to_thread(make)


@contextmanager
def _refusals_logged(path: str, body: type[GenerationBody]) -> Iterator[None]:
    """Around what makes a request of a body: what is refused there comes to no account, which would log it. Names of
    fields are logged as far as they are ours: what else is in a body is the client's."""
    try:
        yield
    except FissileError as error:
        names = dict.fromkeys(_field_name(violation.field, body) for violation in error.violations)
        logger.info("POST %s refused: %s", path, ", ".join([error.code.name.lower(), *names]))
        raise


def _field_name(path: str, body: type[GenerationBody]) -> str:
    name = path.partition(".")[0].partition("[")[0]
    return name if name in body.model_fields else "another field"


@dataclass(frozen=True, slots=True)
class _Exchange(Generic[M]):
    """One request and its response."""

    answers: AsyncGenerator[M]
    writer: Writer[M]
    names: FieldNames
    request_id: str
    is_stream: bool

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The first message comes before the response begins: until then an error has a status of its own."""
        headers = {"x-request-id": self.request_id}
        async with aclosing(self.answers):
            first = await anext(self.answers)
            if self.is_stream:
                async with aclosing(events(first, self.answers, self.writer, self.names)) as stream:
                    await send_events(send, stream, headers)
                return
            num_bytes = first.ByteSize()
            async for message in self.answers:
                num_bytes += message.ByteSize()
                if num_bytes > MAX_WHOLE_BYTES:
                    raise ResourceExhaustedError(
                        f"the answer takes more than {MAX_WHOLE_BYTES} bytes; as a stream it may take any number"
                    )
                join(first, message)
        response = await _made(partial(self._response, first, headers), num_bytes)
        await response(scope, receive, send)

    def _response(self, message: M, headers: dict[str, str]) -> JSONResponse:
        return JSONResponse(self.writer.whole(message), headers=headers)
