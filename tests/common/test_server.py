"""Health, reflection and channelz answer; options act; a taken port is an error."""

import asyncio
import signal
import socket
import subprocess
import sys
import time

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2_grpc
from grpc_channelz.v1.channelz_pb2 import GetServersRequest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common import health, reflection
from common.ports import write_port_file
from common.server import ServiceServer, abort
from fissile.channel import aio_channel
from fissile.errors import InvalidArgumentError, UnavailableError
from fissile.v1 import (
    GenerateRequest,
    GenerateResponse,
    GenerationServiceServicer,
    GenerationServiceStub,
    GetStatsRequest,
    TokenizeRequest,
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


def test_health_follows_set_serving():
    async def scenario(service, channel, port):
        stub = health_pb2_grpc.HealthStub(channel)
        seen = []
        for serving in (None, True, False):
            if serving is not None:
                await service.set_serving(serving)
            for name in ("", NAME):
                seen.append((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)
        return seen

    assert with_server(scenario) == [NOT_SERVING] * 2 + [SERVING] * 2 + [NOT_SERVING] * 2


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
def test_reflection_lists_and_describes_the_services(version):
    """Tools ask by either name, some by one alone."""

    async def scenario(service, channel, port):
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        (listed,) = [r async for r in ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))]
        names = [entry.name for entry in listed.list_services_response.service]
        symbols = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in names]
        described = [r.file_descriptor_response.file_descriptor_proto async for r in ask(iter(symbols))]
        return names, [len(files) > 0 for files in described]

    names, is_described = with_server(scenario)
    assert NAME in names and is_described == [True] * len(names)


def test_reflection_and_channelz_are_there_where_they_are_wanted():
    async def scenario(service, channel, port):
        codes = []
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        for answer in (call.read(), channelz_pb2_grpc.ChannelzStub(channel).GetServers(GetServersRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await answer
            codes.append(raised.value.code())
        return codes

    assert with_server(scenario, reflection=False) == [grpc.StatusCode.UNIMPLEMENTED] * 2


def test_channelz_answers():
    async def scenario(service, channel, port):
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        return await stub.GetServers(GetServersRequest())

    assert with_server(scenario, channelz=True).server


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


def test_watches_of_a_host_are_bounded_and_those_that_end_leave_room(monkeypatch):
    monkeypatch.setattr(health, "MAX_WATCHES_OF_HOST", 2)

    async def scenario(service, channel, port):
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        first, second = stub.Watch(request), stub.Watch(request)
        seen = [(await each.read()).status for each in (first, second)]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(request).read()
        seen.append((await stub.Check(request)).status)
        first.cancel()
        async with asyncio.timeout(20):
            while service._health._watches.num_open == 2:
                await asyncio.sleep(0.005)
        seen.append((await stub.Watch(request).read()).status)
        return seen, refused.value.code()

    assert with_server(scenario) == ([NOT_SERVING] * 4, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_streams_of_reflection_are_bounded_and_those_that_end_leave_room(monkeypatch):
    monkeypatch.setattr(reflection, "MAX_STREAMS_OF_HOST", 2)

    async def scenario(service, channel, port):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def stream():
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await call.read()).list_services_response.service
            return call

        first = await stream()
        await stream()
        with pytest.raises(grpc.aio.AioRpcError, match="2 of 2 of this host") as refused:
            await stream()
        first.cancel()
        async with asyncio.timeout(20):
            while service._reflection._bound.num_open == 2:
                await asyncio.sleep(0.005)
        await stream()
        return refused.value.code()

    assert with_server(scenario) == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_reflection_refuses_a_name_that_none_has():
    async def scenario(service, channel, port):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="x" * 100_000)
        with pytest.raises(grpc.aio.AioRpcError, match="file_containing_symbol: more than") as refused:
            await anext(aiter(stub.ServerReflectionInfo(iter([request]))))
        return refused.value.code()

    assert with_server(scenario) == grpc.StatusCode.INVALID_ARGUMENT


def test_who_asks_reflection_without_end_gets_so_much_and_holds_up_nobody(monkeypatch):
    """One that does not read its answers has no turn of others."""
    num_answers = 0
    answer = reflection.ReflectionServicer._list_services

    def counted(self, request):
        nonlocal num_answers
        num_answers += 1
        return answer(self, request)

    monkeypatch.setattr(reflection.ReflectionServicer, "_list_services", counted)
    monkeypatch.setattr(reflection, "PAUSE_SECONDS", 0.05)

    async def scenario(service, channel, port):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        many = [reflection_pb2.ServerReflectionRequest(list_services="x")] * 1000
        began = time.monotonic()
        flood = [stub.ServerReflectionInfo(iter(many)) for _ in range(4)]
        await flood[0].read()
        await anext(aiter(stub.ServerReflectionInfo(iter(many[:1]))))
        passed = time.monotonic() - began
        for call in flood:
            call.cancel()
        return passed

    passed = with_server(scenario)
    assert 2 <= num_answers <= passed / 0.05 + 1


def test_the_end_of_one_watch_leaves_the_others_their_ears():
    async def scenario(service, channel, port):
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        first, second = stub.Watch(request), stub.Watch(request)
        seen = [(await each.read()).status for each in (first, second)]
        first.cancel()
        async with asyncio.timeout(20):
            while service._health._watches.num_open == 2:
                await asyncio.sleep(0.005)
            await service.set_serving(True)
            return [*seen, (await second.read()).status]

    assert with_server(scenario) == [NOT_SERVING, NOT_SERVING, SERVING]


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


SIGNALLED = """
import asyncio
import signal
import subprocess
import sys
import time
from common.server import stop_event_on_signals
async def main():
    stop = stop_event_on_signals()
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_second_signal_ends_the_process_at_once_and_in_silence():
    command = [sys.executable, "-c", SIGNALLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 130


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


SIGNALS = """
import asyncio
import os
import signal
from common.server import stop_event_on_signals
async def main():
    stop = stop_event_on_signals()
    stop.set()
    for _ in range({}):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
asyncio.run(main())
"""


@pytest.mark.parametrize(("number", "code"), [(1, 0), (2, 130)])
def test_a_second_signal_ends_the_process_and_not_the_first_after_another_cause(number, code):
    """A worker is stopped by those that it steps together with, too, and then by who stops them all."""
    assert subprocess.run([sys.executable, "-c", SIGNALS.format(number)], timeout=60).returncode == code
