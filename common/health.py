"""gRPC's health service. That of grpc_health makes all watches of a service deaf when one of them ends (1.85), and has
no bound, though it needs no key and each watch takes some 20 kB for as long as its client likes."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.host_bound import HostBound
from fissile.errors import NotFoundError

MAX_WATCHES_OF_HOST = 256
MAX_WATCHES = 8192

Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Of one server, whose services are known by what `set` says of them."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        """Set, and replaced, with each change."""
        self._is_stopping = False
        self._watches = HostBound("health watches (Check has no bound)", MAX_WATCHES_OF_HOST, MAX_WATCHES)

    async def set(self, service: str, status: int) -> None:
        """Does nothing once it is stopping."""
        if not self._is_stopping:
            self._states[service] = status
            self._tell()

    async def enter_graceful_shutdown(self) -> None:
        """Nothing is served, and will be."""
        self._is_stopping = True
        self._states = dict.fromkeys(self._states, Response.NOT_SERVING)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._states.get(request.service)
        if status is None:
            raise NotFoundError(f"no service {request.service!r} is here")
        return Response(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        with self._watches.entered(context):
            await self._watch(request.service, context)

    async def _watch(self, service: str, context: grpc.aio.ServicerContext) -> None:
        told = None
        while True:
            changed = self._changed  # before it is looked at: what changes while it is written counts
            status = self._states.get(service, Response.SERVICE_UNKNOWN)
            if status != told:
                await context.write(Response(status=status))
                told = status
            await changed.wait()
