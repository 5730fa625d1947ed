"""Server-sent events."""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from starlette.types import Send

from common.faults import log_fault
from fissile.errors import FissileError, InternalError
from router.http.answers import Json, Writer
from router.http.errors import error_object
from router.http.field_names import FieldNames

logger = logging.getLogger(__name__)

M = TypeVar("M")

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and proxies see that the connection is alive."""
DONE = b"data: [DONE]\n\n"


def event(value: Json) -> bytes:
    """ASCII, so that no client can take a character of the text for the end of a line."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


async def events(first: M, rest: AsyncIterator[M], writer: Writer[M], names: FieldNames) -> AsyncGenerator[bytes, None]:
    """All of a stream: a message's chunks together, a comment for an empty message. An error is an event, too, and then
    the last one."""
    try:
        yield _event_of(first, writer)
        async for answer in rest:
            yield _event_of(answer, writer)
    except FissileError as error:
        yield event(error_object(names.translate(error)))
    except Exception as error:
        log_fault(logger, error, "a stream failed")
        yield event(error_object(InternalError("internal error; the server's log has the details")))
    else:
        yield DONE


def _event_of(answer: M, writer: Writer[M]) -> bytes:
    return b"".join(map(event, writer.chunks(answer))) or KEEP_ALIVE


async def send_events(send: Send, stream: AsyncIterator[bytes], headers: dict[str, str]) -> None:
    """As one response. `send` waits for a client that is slow to read."""
    head = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
    raw = [(name.encode(), value.encode()) for name, value in head.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    async for part in stream:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
