"""gRPC's server reflection, which needs no key: so its streams have a bound, and so has what their requests cost."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME, aio

from common.host_bound import HostBound
from fissile.errors import InvalidArgumentError

SERVICE_NAMES = (SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
"""The same on the wire: old tools know v1alpha alone, some others v1 alone. The package that we use has only the first,
which is therefore the one that is listed and described."""
MAX_STREAMS_OF_HOST = 32
MAX_STREAMS = 1024
MAX_REQUEST_BYTES = 4096
"""Names are shorter, and each answer has its request in it."""
PAUSE_SECONDS = 0.005
"""Before each answer, of all clients together: the longest takes a tenth of that."""


class ReflectionServicer(aio.ReflectionServicer):
    """Of one server, with all its listeners. It lists itself after `service_names`."""

    def __init__(self, service_names: Sequence[str]) -> None:
        super().__init__([*service_names, SERVICE_NAME])
        self._bound = HostBound("streams of server reflection", MAX_STREAMS_OF_HOST, MAX_STREAMS)
        self._turn = asyncio.Lock()

    def serve(self, server: grpc.aio.Server) -> None:
        """Before it starts, under each name."""
        method = grpc.stream_stream_rpc_method_handler(
            self.ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in SERVICE_NAMES]
        )

    async def ServerReflectionInfo(
        self,
        request_iterator: AsyncIterator[reflection_pb2.ServerReflectionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncGenerator[reflection_pb2.ServerReflectionResponse, None]:
        with self._bound.entered(context):
            async with aclosing(super().ServerReflectionInfo(self._in_turn(request_iterator), context)) as responses:
                async for response in responses:
                    yield response

    async def _in_turn(
        self, requests: AsyncIterator[reflection_pb2.ServerReflectionRequest]
    ) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        """The turn ends before the answer begins: whoever does not read theirs keeps nobody waiting."""
        async for request in requests:
            if request.ByteSize() > MAX_REQUEST_BYTES:
                raise InvalidArgumentError.of(
                    request.WhichOneof("message_request") or "host", f"more than {MAX_REQUEST_BYTES} bytes"
                )
            async with self._turn:
                await asyncio.sleep(PAUSE_SECONDS)
            yield request
