"""What both services' gRPC servers have in common: health, reflection, channelz, error mapping, signals.

One asyncio event loop per process (grpc.aio needs that).
"""

import asyncio
import inspect
import logging
import math
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
from grpc_channelz.v1.channelz import add_channelz_servicer
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.decoding import decode
from common.entrance import Admit, Entrance, admit_all
from common.faults import log_fault
from common.health import HealthServicer
from common.ports import check_can_listen
from common.reflection import ReflectionServicer
from fissile.channel import MAX_MESSAGE_BYTES, SERVER_OPTIONS
from fissile.errors import STATUS_DETAILS_KEY, FissileError, InternalError, InvalidArgumentError, UnavailableError
from fissile.tls import ServerTls

logger = logging.getLogger(__name__)

CHANNELZ = "grpc.channelz.v1.Channelz"
RETRY_PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""What RetryInfo says to programs, for gRPC's own retries, which read none."""
MAX_PUSHBACK_MS = 2**31 - 1


S = TypeVar("S")
Handler = Any  # grpc.RpcMethodHandler, which has no types
Parse = Callable[[bytes], Any]
"""`FromString` of a message."""
Decode = Callable[[bytes], Awaitable[Any]]
"""Raises InvalidArgumentError for bytes that will not do."""
Read = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]
"""From the messages of a call, as bytes, to its request or an iterator of requests."""
Take = Callable[[Decode, grpc.aio.ServicerContext], Awaitable[Any]]
"""Receives the one message of a call and decodes it. Until then nothing of it has been read, and whoever sends more
than a little has to wait: so it may take its time."""


async def receive(context: grpc.aio.ServicerContext) -> bytes:
    """The one message of a call. Raises InvalidArgumentError if there is none."""
    raw = await context.read()
    if raw is grpc.aio.EOF:
        raise InvalidArgumentError("the call ended without a request")
    return raw


async def take_at_once(decode: Decode, context: grpc.aio.ServicerContext) -> Any:
    return await decode(await receive(context))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Lets in whom `admit` does. Turns a `FissileError` into its status, a request that protobuf refuses into
    INVALID_ARGUMENT, and anything else into INTERNAL, logged here and without its text."""

    def __init__(self, admit: Admit = admit_all, take: Take = take_at_once, returning: Collection[str] = ()) -> None:
        """`take`: the requests of calls that have one. `returning`: see `ServiceServer`."""
        self._admit = admit
        self._take = take
        self._returning = returning
        self._handlers: dict[str, Handler] = {}
        """Of the methods that were called: each is the same for all its calls."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is None:
            plain = await continuation(handler_call_details)
            handler = None if plain is None else self._guarded(method, plain)
            if handler is not None:
                self._handlers[method] = handler
        return handler

    def _guarded(self, method: str, handler: Handler) -> Handler | None:
        """None: nobody has written it, it is of the generated base class."""
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if asyncio.iscoroutinefunction(behaviour):
            guard: Callable[..., Any] = _guard_coroutine
        elif inspect.isasyncgenfunction(behaviour):
            guard = _guard_generator
        else:
            return None
        parse = handler.request_deserializer
        if handler.request_streaming:
            read: Read = partial(_read_stream, parse)
        else:
            read = partial(_read_one, parse, method, self._take)
        # All take a stream of requests: gRPC reads the one of other handlers before they are asked.
        streams = handler.response_streaming and method not in self._returning
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        return make(guard(behaviour, read, method, self._admit), response_serializer=handler.response_serializer)


async def _read_one(parse: Parse, method: str, take: Take, _raw: Any, context: grpc.aio.ServicerContext) -> Any:
    """The request. One that cannot be read comes to no handler, so nobody else would log it."""
    try:
        return await take(lambda raw: decode(raw, parse), context)
    except FissileError as error:
        logger.info("%s refused: %s", method, error.message)
        raise


async def _read_stream(parse: Parse, raw: AsyncIterator[bytes], _context: grpc.aio.ServicerContext) -> Any:
    async def requests() -> AsyncIterator[Any]:
        async for request in raw:
            yield await decode(request, parse)

    return requests()


def _guard_coroutine(
    behaviour: Callable[..., Awaitable[Any]], read: Read, method: str, admit: Admit
) -> Callable[..., Awaitable[Any]]:
    """Of a handler that returns its response, or writes them itself; or both: see `ServiceServer`."""

    async def guarded(raw: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            admit(method, context)
            return await behaviour(await read(raw, context), context)
        except Exception as error:
            await abort(context, error, method)

    return guarded


def _guard_generator(
    behaviour: Callable[..., AsyncGenerator[Any, None]], read: Read, method: str, admit: Admit
) -> Callable[..., AsyncIterator[Any]]:
    async def guarded(raw: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            admit(method, context)
            async with aclosing(behaviour(await read(raw, context), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await abort(context, error, method)

    return guarded


async def abort(context: grpc.aio.ServicerContext, error: Exception, method: str) -> None:
    """End the call with the status of `error`. Never returns normally. A client that has gone in the meantime, or a
    server that has stopped, is no fault of ours: the handler is then cancelled, as it is when gRPC notices first."""
    try:
        if isinstance(error, grpc.aio.BaseError):
            raise error
        await _send_status(context, error, method)
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except grpc.aio.BaseError as gone:
        raise asyncio.CancelledError from gone


async def _send_status(context: grpc.aio.ServicerContext, error: Exception, method: str) -> None:
    """Raises AbortError."""
    if not isinstance(error, FissileError):
        log_fault(logger, error, "%s failed", method)
        error = InternalError("internal error; the server's log has the details")
    status = error.to_status()
    trailers: list[tuple[str, str | bytes]] = [(STATUS_DETAILS_KEY, status.SerializeToString())]
    if error.retry_after is not None:
        trailers.append((RETRY_PUSHBACK_KEY, str(min(math.ceil(error.retry_after * 1000), MAX_PUSHBACK_MS))))
    await context.abort(error.code, status.message, tuple(trailers))


class ServiceServer:
    """A grpc.aio server around one service.

    Health is NOT_SERVING until `set_serving(True)`; both the overall ("") and the service's own entry are kept.
    """

    def __init__(
        self,
        service_name: str,
        tls: ServerTls | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        *,
        admit: Admit = admit_all,
        take: Take = take_at_once,
        returning: Collection[str] = (),
        options: Mapping[str, int] = MappingProxyType({}),
        reflection: bool = True,
        channelz: bool = False,
        num_listeners: int = 1,
    ) -> None:
        """`interceptors` see a call before it is read, `admit` when its handler begins; `take` receives requests of
        calls that have one; `options` go before ours. `reflection` tells everyone the contract, `channelz` tells whom
        `admit` lets in of connections and calls. Handlers of `returning` (`/package.Service/Method`) return the last
        message of their stream, which so leaves with the status, and write those before it as bytes.

        `num_listeners`: on the one port, between which the system spreads connections at random. Each takes up its
        calls one after the other, with several turns of the event loop for each.
        """
        self._service_name = service_name
        self._tls = tls
        self._entrance = Entrance(admit)
        self._closing = asyncio.Lock()
        all_options = {
            **dict(SERVER_OPTIONS),
            "grpc.max_receive_message_length": max_request_bytes,
            **options,
            "grpc.so_reuseport": int(num_listeners > 1),
            # Would note each call and message, whether anybody may ask for it or not.
            "grpc.enable_channelz": int(channelz),
        }
        self._listeners = [
            grpc.aio.server(
                interceptors=[*interceptors, ErrorInterceptor(self._entrance.let_in, take, returning)],
                options=list(all_options.items()),
            )
            for _ in range(num_listeners)
        ]
        self._health = HealthServicer()
        names = [service_name, health.SERVICE_NAME, *([CHANNELZ] if channelz else ())]
        self._reflection = ReflectionServicer(names)
        for listener in self._listeners:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, listener)
            if channelz:
                add_channelz_servicer(listener)
            if reflection:
                self._reflection.serve(listener)

    def serve(self, add_to_server: Callable[[S, grpc.aio.Server], None], servicer: S) -> None:
        """Before `start`. `add_to_server`: of the servicer's class, from its stubs."""
        for listener in self._listeners:
            add_to_server(servicer, listener)

    async def start(self, host: str, port: int) -> int:
        """Bind and serve; returns the port (of use when 0 was asked for). Raises UnavailableError if it is taken, or
        no address of the host is this machine's."""
        check_can_listen(host, port)
        for listener in self._listeners:
            port = self._bind(listener, host, port)
        await self.set_serving(False)
        for listener in self._listeners:
            await listener.start()
        return port

    def _bind(self, listener: grpc.aio.Server, host: str, port: int) -> int:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                return listener.add_insecure_port(address)
            return listener.add_secure_port(address, self._tls.credentials())
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {address}") from error

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", self._service_name):
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        """Refuse new calls, give open ones `grace` seconds, then cancel them. Whoever watches health hears of it."""
        await self._health.enter_graceful_shutdown()
        await self._entrance.shut()
        await self.close(grace)

    async def close(self, grace: float) -> None:
        """The same without a word. Idempotent, but one after another: grpc.aio lets a second `stop` go on with a server
        that the first has freed meanwhile, and the process dies of it (segmentation fault, seen in 1.85)."""
        async with self._closing:
            await asyncio.gather(*(listener.stop(grace) for listener in self._listeners))


def stop_event_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; a second signal ends the process at once with status 130, without any more
    of it: what it started ends with it. Others may set the event, too: a first signal after that is none of these."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    has_come = False

    def on_signal() -> None:
        nonlocal has_come
        if has_come:
            os._exit(130)
        has_come = True
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return event
