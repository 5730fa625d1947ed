"""Options of a server act; a taken port is an error; calls of any number and size are answered."""

import asyncio
import socket
import subprocess
import sys
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.calls import abort, take_at_once
from common.ports import write_port_file
from common.server import ServiceServer
from fissile.channel import aio_channel
from fissile.errors import InvalidArgumentError, UnavailableError
from fissile.v1 import (
    GenerateRequest,
    GenerateResponse,
    GenerationServiceStub,
    GetStatsRequest,
    TokenizeRequest,
    add_GenerationServiceServicer_to_server,
)
from tests.common.served import NAME, SERVING, Echo, with_server


def test_message_of_20_mib_passes():
    async def scenario(service, channel, port):
        text = "x" * (20 << 20)
        return (await GenerationServiceStub(channel).Tokenize(TokenizeRequest(text=text))).token_ids

    assert list(with_server(scenario)) == [20 << 20]


def test_message_over_the_limit_is_a_status():
    async def scenario(service, channel, port):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await GenerationServiceStub(channel).Tokenize(TokenizeRequest(text="x" * (65 << 20)))
        return raised.value.code()

    assert with_server(scenario) == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("num_listeners", [(1, 1), (1, 4), (4, 1), (4, 4)])
def test_taken_port_is_an_error_and_not_shared(num_listeners):
    first, second = num_listeners

    async def scenario(service, channel, port):
        other = ServiceServer(NAME, num_listeners=second)
        with pytest.raises(UnavailableError, match=str(port)):
            await other.start("127.0.0.1", port)

    with_server(scenario, num_listeners=first)


@pytest.mark.parametrize("num_listeners", [1, 4])
@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("192.0.2.1", "cannot listen on 192.0.2.1:0: Cannot assign requested address"),  # kept for documents: nobody's
        ("no-such-host.invalid", "cannot listen on no-such-host.invalid:0: "),
    ],
)
def test_who_cannot_listen_says_why_and_grpc_prints_nothing(host, said, num_listeners, capfd):
    async def start():
        server = ServiceServer(NAME, num_listeners=num_listeners)
        with pytest.raises(UnavailableError) as raised:
            await server.start(host, 0)
        return str(raised.value)

    assert asyncio.run(start()).startswith(said)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_port_of_which_one_address_is_taken_is_not_shared(host):
    async def start(port):
        with pytest.raises(UnavailableError, match=f"cannot listen on {host}:{port}: Address already in use"):
            await ServiceServer(NAME, num_listeners=4).start(host, port)

    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        asyncio.run(start(taken.getsockname()[1]))


def test_port_file_that_cannot_be_written_is_named_as_it_was_given(tmp_path):
    path = tmp_path / "none" / "port"
    with pytest.raises(OSError, match=f"^port file {path}: No such file or directory$"):
        write_port_file(path, 1)


def test_listeners_of_one_port_serve_the_same_and_end_together():
    async def scenario(service, channel, port):
        await service.set_serving(True)
        channels = [aio_channel(f"127.0.0.1:{port}") for _ in range(24)]
        calls = (GenerationServiceStub(each).Tokenize(TokenizeRequest(text="abc")) for each in channels)
        answers = {tuple(answer.token_ids) for answer in await asyncio.gather(*calls)}
        watches = [health_pb2_grpc.HealthStub(each).Watch(health_pb2.HealthCheckRequest()) for each in channels]
        states = {(await watch.read()).status for watch in watches}
        await service.stop(0)
        for each in channels:
            await each.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        return answers, states

    assert with_server(scenario, num_listeners=8) == ({(3,)}, {SERVING})


def test_unwritten_rpc_is_unimplemented():
    async def scenario(service, channel, port):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await GenerationServiceStub(channel).GetStats(GetStatsRequest())
        return raised.value.code()

    assert with_server(scenario) == grpc.StatusCode.UNIMPLEMENTED


class Gone:
    """A call whose client has gone: gRPC refuses to send anything."""

    async def abort(self, code, details, metadata):
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")


@pytest.mark.parametrize("error", [grpc.aio.InternalError("Failed execute_batch"), InvalidArgumentError("bad")])
def test_a_client_that_has_gone_cancels_the_handler_and_is_no_error_of_ours(error, caplog):
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(abort(Gone(), error, "/a/B"))
    assert caplog.records == []


def test_a_call_that_is_read_after_the_end_of_its_server_is_no_error_of_ours(caplog):
    async def scenario():
        arrived, ended = asyncio.Event(), asyncio.Event()

        async def take(decode, context):
            arrived.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()  # until the server stops
            ended.set()
            return await take_at_once(decode, context)  # whether or not the request has come meanwhile

        service = ServiceServer(NAME, take=take)
        service.serve(add_GenerationServiceServicer_to_server, Echo())
        port = await service.start("127.0.0.1", 0)
        async with aio_channel(f"127.0.0.1:{port}") as channel:
            call = GenerationServiceStub(channel).Tokenize(TokenizeRequest(text="a"))
            await arrived.wait()
            await service.stop(0)
            await ended.wait()
            with pytest.raises(grpc.aio.AioRpcError):
                await call

    asyncio.run(scenario())
    assert caplog.records == []


def test_thousands_of_calls_at_once_are_all_taken_up():
    """gRPC's own limit of 1,000 that wait would cancel some of them."""

    async def scenario(service, channel, port):
        stub = GenerationServiceStub(channel)

        async def call():
            return [message async for message in stub.Generate(GenerateRequest())]

        return await asyncio.gather(*(call() for _ in range(2_000)))

    assert with_server(scenario) == [[GenerateResponse()]] * 2_000


def test_a_request_that_is_too_large_is_not_read():
    async def scenario():
        service = ServiceServer(NAME, max_request_bytes=1000)
        service.serve(add_GenerationServiceServicer_to_server, Echo())
        port = await service.start("127.0.0.1", 0)
        async with aio_channel(f"127.0.0.1:{port}") as channel:
            stub = GenerationServiceStub(channel)
            assert (await stub.Tokenize(TokenizeRequest(text="x" * 900))).token_ids == [900]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Tokenize(TokenizeRequest(text="x" * 1100))
        await service.stop(0)
        return raised.value.code()

    assert asyncio.run(scenario()) is grpc.StatusCode.RESOURCE_EXHAUSTED


CLOSED_TWICE = """
import asyncio
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from common.server import ServiceServer
async def main():
    for _ in range(100):
        server = ServiceServer("toy")
        port = await server.start("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            await asyncio.gather(*(server.close(grace) for grace in (0, 0, 0, 0.001)))
asyncio.run(main())
"""


def test_a_server_may_be_closed_twice_at_once():
    """In a process of its own, which a fault would end."""
    assert subprocess.run([sys.executable, "-c", CLOSED_TWICE], stderr=subprocess.DEVNULL, timeout=60).returncode == 0
