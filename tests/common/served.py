"""A service that echoes, over real sockets."""

import asyncio

from grpc_health.v1 import health_pb2

from common.server import ServiceServer
from fissile.channel import aio_channel
from fissile.v1 import (
    GenerateResponse,
    GenerationServiceServicer,
    TokenizeResponse,
    add_GenerationServiceServicer_to_server,
)

NAME = "fissile.v1.GenerationService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Echo(GenerationServiceServicer):
    async def Generate(self, request, context):
        yield GenerateResponse()

    async def Tokenize(self, request, context):
        return TokenizeResponse(token_ids=[len(request.text)])


def with_server(scenario, **options):
    async def run():
        service = ServiceServer(NAME, **options)
        service.serve(add_GenerationServiceServicer_to_server, Echo())
        port = await service.start("127.0.0.1", 0)
        try:
            async with aio_channel(f"127.0.0.1:{port}") as channel:
                return await scenario(service, channel, port)
        finally:
            await service.stop(0)

    return asyncio.run(run())
