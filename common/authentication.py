"""The key that clients show as `Authorization: Bearer KEY`, in gRPC metadata and in HTTP headers alike."""

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from common.server import Handler, abort
from fissile.errors import UnauthenticatedError

logger = logging.getLogger(__name__)

HEADER = "authorization"
OPEN_SERVICES = frozenset({health.SERVICE_NAME, reflection.SERVICE_NAME})
"""Asked by load balancers and tools that have no key; what they say is no secret."""


class ApiKey:
    """What a client must show. Compared in a time that tells nothing of the key; never shown."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def check(self, header: bytes) -> None:
        """Raises UnauthenticatedError unless `header` is `Bearer KEY`. The scheme's case does not matter."""
        scheme, _, shown = header.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(shown, self._key):
            raise UnauthenticatedError("authorization: a valid API key is needed")


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without the key before anything of their request is read; the open services need none."""

    def __init__(self, key: ApiKey) -> None:
        self._key = key

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        if method.split("/")[1] not in OPEN_SERVICES:
            try:
                self._key.check(_header(handler_call_details.invocation_metadata))
            except UnauthenticatedError as error:
                logger.info("%s refused: %s", method, error.message)
                return _refusing(error, method)
        return await continuation(handler_call_details)


def _header(metadata: Any) -> bytes:
    value = dict(metadata).get(HEADER, "")
    return value if isinstance(value, bytes) else value.encode()


def _refusing(error: UnauthenticatedError, method: str) -> Handler:
    """Fits every kind of call: it reads nothing and writes nothing."""

    async def refuse(_requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> NoReturn:
        await abort(context, error, method)
        raise AssertionError("abort never returns")

    return grpc.stream_stream_rpc_method_handler(refuse)
