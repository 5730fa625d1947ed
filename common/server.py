"""What both services' gRPC servers have in common: listeners, health, reflection, channelz.

One asyncio event loop per process (grpc.aio needs that).
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import grpc
from grpc_channelz.v1.channelz import add_channelz_servicer
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.calls import CallInterceptor, Take, take_at_once
from common.entrance import Admit, Entrance, admit_all
from common.health import HealthServicer
from common.reflection import ReflectionServicer
from fissile.channel import MAX_MESSAGE_BYTES, SERVER_OPTIONS
from fissile.errors import UnavailableError
from fissile.ports import check_can_listen
from fissile.tls import ServerTls

CHANNELZ = "grpc.channelz.v1.Channelz"

S = TypeVar("S")


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
                interceptors=[*interceptors, CallInterceptor(self._entrance.let_in, take, returning)],
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
