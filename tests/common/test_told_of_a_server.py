"""Health, reflection and channelz answer, and have bounds."""

import asyncio
import time

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2_grpc
from grpc_channelz.v1.channelz_pb2 import GetServersRequest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common import health, reflection
from tests.common.served import NAME, NOT_SERVING, SERVING, with_server


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

        first, _second = await stream(), await stream()  # gRPC may end a call that nobody holds
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
