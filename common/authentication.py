"""The key that callers show as `Authorization: Bearer KEY`, in gRPC metadata and in HTTP headers alike."""

import hashlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Generic, NoReturn, TypeVar

import grpc

from common.calls import Handler, abort
from common.entrance import OPEN_SERVICES, service_of
from common.faults import shown
from fissile.errors import UnauthenticatedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEADER = "authorization"


class KeyTable(Generic[T]):
    """What each key stands for. Keys are never kept, only SHA-256 digests of them; and they are looked up by a digest
    under a random key of this process, so the time that it takes tells nothing of what is there."""

    def __init__(self, by_digest: Mapping[bytes, T]) -> None:
        """By SHA-256 of a key."""
        self._blinding = secrets.token_bytes(32)
        self._by_blinded = {self._blinded(digest): value for digest, value in by_digest.items()}

    def __len__(self) -> int:
        return len(self._by_blinded)

    def find(self, header: bytes) -> T:
        """What the key of `Bearer KEY` stands for. Raises UnauthenticatedError if it is none of them, or no such header
        at all. The scheme's case does not matter."""
        scheme, _, shown = header.partition(b" ")
        blinded = self._blinded(hashlib.sha256(shown).digest())
        if scheme.lower() != b"bearer" or blinded not in self._by_blinded:
            raise UnauthenticatedError("authorization: a valid API key is needed")
        return self._by_blinded[blinded]

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._blinding, digest, "sha256")


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without a key before anything of their request is read; the open services need none."""

    def __init__(self, check: Callable[[bytes], object]) -> None:
        """`check` raises UnauthenticatedError for a header that will not do."""
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        if service_of(method) not in OPEN_SERVICES:
            try:
                self._check(header_of(handler_call_details.invocation_metadata))
            except UnauthenticatedError as error:
                logger.info("%s refused: %s", shown(method), error.message)
                return _refusing(error, method)
        return await continuation(handler_call_details)


def header_of(metadata: Any) -> bytes:
    """Of a call; empty if it has none."""
    value = dict(metadata).get(HEADER, "")
    return value if isinstance(value, bytes) else value.encode()


def _refusing(error: UnauthenticatedError, method: str) -> Handler:
    """Fits every kind of call: it reads nothing and writes nothing."""

    async def refuse(_requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> NoReturn:
        await abort(context, error, method)
        raise AssertionError("abort never returns")

    return grpc.stream_stream_rpc_method_handler(refuse)
