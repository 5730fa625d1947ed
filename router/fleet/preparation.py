"""What a router does while a worker loads its model: load its tokenizer, and wait for it to serve."""

import asyncio
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fissile.channel import KeyedChannel, aio_channel
from fissile.errors import FissileError
from fissile.tls import ClientTls
from fissile.v1 import GetTokenizerRequest, WorkerServiceStub
from router.config import RouterSettings
from router.model.tokenizer import Tokenizer, TokenizerStore


class Preparation:
    """For connections to one worker."""

    def __init__(
        self, address: str, tokenizers: TokenizerStore, settings: RouterSettings, tls: ClientTls | None
    ) -> None:
        self._address, self._tokenizers, self._settings, self._tls = address, tokenizers, settings, tls
        self._ahead: Tokenizer | None = None
        """Loaded before the worker says what it is; the store keeps only what somebody holds."""

    def stub(self, channel: grpc.aio.Channel) -> WorkerServiceStub:
        return WorkerServiceStub(KeyedChannel(channel, self._settings.worker_key.get_secret_value()))

    async def tokenizer(self, stub: WorkerServiceStub, fingerprint: str) -> Tokenizer:
        """The one that the worker says is its own. Raises AioRpcError or InternalError."""
        found = self._tokenizers.get(fingerprint) or await self._fetch(stub)
        self._ahead = None
        return found

    async def pause(self, seconds: float) -> None:
        """Before the next connection to a worker that has refused one. Less than `seconds` once it begins to serve."""
        try:
            async with aio_channel(self._address, self._tls) as channel:
                # Together: it may begin to serve while its tokenizer is loaded.
                await asyncio.gather(self._load_ahead(channel), _pause(channel, seconds))
        except FissileError:  # TLS files that have changed
            await asyncio.sleep(seconds)

    async def _load_ahead(self, channel: grpc.aio.Channel) -> None:
        """Once, if the worker knows its tokenizer yet."""
        if self._ahead is None:
            with suppress(FissileError, grpc.aio.AioRpcError):
                self._ahead = await self._fetch(self.stub(channel))

    async def _fetch(self, stub: WorkerServiceStub) -> Tokenizer:
        return await self._tokenizers.fetch(
            stub.GetTokenizer(GetTokenizerRequest(), timeout=self._settings.connect_timeout)
        )


async def _pause(channel: grpc.aio.Channel, seconds: float) -> None:
    """A worker that serves all the time, or cannot be asked, has another reason to refuse a connection."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            if not await _begins_to_serve(channel):
                await asyncio.sleep(seconds)


async def _begins_to_serve(channel: grpc.aio.Channel) -> bool:
    """Whether it does before its watch ends."""
    is_serving = True
    with suppress(grpc.aio.AioRpcError):
        async for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            was_serving, is_serving = is_serving, response.status == health_pb2.HealthCheckResponse.SERVING
            if is_serving and not was_serving:
                return True
    return False
