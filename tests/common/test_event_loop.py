"""What gRPC's thread tells the loop in many bytes costs it one turn."""

import asyncio
import socket

import grpc
import pytest

from common.event_loop import EventLoop
from common.server import ServiceServer
from fissile.channel import aio_channel


@pytest.mark.parametrize("num_bytes", [1, 2, 200])
def test_all_bytes_of_a_wake_are_read_at_once(num_bytes):
    ours, theirs = socket.socketpair()
    with ours, theirs, asyncio.Runner(loop_factory=EventLoop) as runner:
        read = []

        async def scenario():
            asyncio.get_running_loop().add_reader(ours, lambda number: read.append((number, ours.recv(1))), 7)
            theirs.send(bytes(num_bytes))
            await asyncio.sleep(0.01)
            assert read == [(7, b"\0")]
            theirs.send(b"\1")
            await asyncio.sleep(0.01)
            asyncio.get_running_loop().remove_reader(ours)

        runner.run(scenario())
        assert read == [(7, b"\0"), (7, b"\1")]


def test_grpc_watches_a_socket_that_only_wakes():
    """What the remedy goes by."""
    watched = []

    class Loop(EventLoop):
        def add_reader(self, fd, callback, *args):
            watched.append((type(fd), "_handle_events" in repr(callback)))
            super().add_reader(fd, callback, *args)

    async def scenario():
        server = ServiceServer("x")
        port = await server.start("127.0.0.1", 0)
        try:
            async with aio_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                    await channel.unary_unary("/x/Y")(b"")
        finally:
            await server.close(0)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(scenario())
    assert (socket.socket, True) in watched
    assert {kind for kind, is_grpc in watched if not is_grpc} <= {int}
