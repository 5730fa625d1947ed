"""What stands around each handler of both services' gRPC servers: who may come in, how a request is read, and what a
fault becomes. A call that has ended leaves nothing to the garbage collector.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from common.decoding import decode
from common.entrance import Admit, admit_all
from common.faults import log_fault
from fissile.errors import STATUS_DETAILS_KEY, FissileError, InternalError, InvalidArgumentError

logger = logging.getLogger(__name__)

RETRY_PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""What RetryInfo says to programs, for gRPC's own retries, which read none."""
MAX_PUSHBACK_MS = 2**31 - 1

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


class CallInterceptor(grpc.aio.ServerInterceptor):
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


def at_end_of_call(callback: Callable[[], object]) -> None:
    """Call it once the call has ended whose handler is running: its status is sent, or its client is gone.

    gRPC runs a handler, and sends the status, in one task. The context's own `add_done_callback` makes a cycle of all
    that a call consists of, which only the garbage collector frees; a task lets go of what it has called.
    """
    task = asyncio.current_task()
    assert task is not None, "handlers run in tasks"
    task.add_done_callback(lambda _: callback())


async def abort(context: grpc.aio.ServicerContext, error: Exception, method: str) -> None:
    """End the call with the status of `error`. Never returns normally. A client that has gone in the meantime, or a
    server that has stopped, is no fault of ours: the handler is then cancelled, as it is when gRPC notices first."""
    try:
        if isinstance(error, grpc.aio.BaseError):
            raise error
        await _send_status(context, error, method)
    except grpc.aio.AbortError as aborted:
        at_end_of_call(partial(_forget_origin, aborted))
        raise
    except grpc.aio.UsageError:
        raise
    except grpc.aio.BaseError as gone:
        raise asyncio.CancelledError from gone


def _forget_origin(error: grpc.aio.AbortError) -> None:
    """gRPC keeps it together with the call's state, which the frames that it came through know: all of them would be
    left to the garbage collector."""
    error.__traceback__ = error.__context__ = None


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
