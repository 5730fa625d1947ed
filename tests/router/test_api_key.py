"""A router with a key: gRPC and HTTP want it, health and reflection do not, and it is never logged."""

import asyncio
import logging

import grpc
import httpx2
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fissile import AsyncClient, Client, UnauthenticatedError
from fissile.errors import InvalidArgumentError
from fissile.v1 import GenerateRequest, ListModelsRequest
from router.config import RouterSettings
from tests.fakes.system import error_of, run_system
from tests.fakes.worker import FakeWorker, says

KEY = "s3cret"


def guarded(scenario, **settings):
    return run_system(scenario, FakeWorker(says(" Paris")), api_key=KEY, channelz=True, **settings)


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer other"),), (("authorization", KEY),)])
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_call_without_the_key_is_unauthenticated(metadata, is_stream, caplog):
    async def scenario(system):
        if is_stream:
            call = system.stub.Generate(GenerateRequest(text="a"), metadata=metadata).read()
        else:
            call = system.stub.ListModels(ListModelsRequest(), metadata=metadata)
        return await error_of(call), dict(system.router.parts.metrics.finished)

    with caplog.at_level(logging.DEBUG):
        error, finished = guarded(scenario)
    assert isinstance(error, UnauthenticatedError)
    assert error.message == "authorization: a valid API key is needed"
    assert finished == {}
    assert KEY not in caplog.text and "other" not in caplog.text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_a_call_with_it_is_served(scheme):
    async def scenario(system):
        call = system.stub.ListModels(ListModelsRequest(), metadata=(("authorization", f"{scheme} {KEY}"),))
        return [model.id for model in (await call).models]

    assert guarded(scenario) == ["toy"]


def test_the_clients_show_it():
    async def scenario(system):
        address = f"127.0.0.1:{system.port}"

        def blocking():
            with Client(address, api_key=KEY) as client:
                return client.generate("a").result().text, client.models()[0].id

        async with AsyncClient(address, api_key=KEY) as client:
            answers = [(await client.generate("a").result()).text, (await client.models())[0].id]
        async with AsyncClient(address, api_key="other") as client:
            with pytest.raises(UnauthenticatedError):
                await client.generate("a").result()
            with pytest.raises(UnauthenticatedError):
                await client.models()
        return answers, await asyncio.to_thread(blocking)

    assert guarded(scenario) == ([" Paris", "toy"], (" Paris", "toy"))


def test_health_and_reflection_need_none_and_channelz_does():
    async def scenario(system):
        health = health_pb2_grpc.HealthStub(system.channel)
        status = (await health.Check(health_pb2.HealthCheckRequest())).status
        reflection = reflection_pb2_grpc.ServerReflectionStub(system.channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        services = (await anext(aiter(call))).list_services_response.service
        channelz = channelz_pb2_grpc.ChannelzStub(system.channel)
        return status, len(services), await error_of(channelz.GetServers(channelz_pb2.GetServersRequest()))

    status, num_services, error = guarded(scenario)
    assert status == health_pb2.HealthCheckResponse.SERVING and num_services == 4
    assert isinstance(error, UnauthenticatedError)


def test_a_method_that_is_not_there_is_not_told_to_strangers():
    async def scenario(system):
        return await error_of(system.channel.unary_unary("/fissile.v1.GenerationService/Nothing")(b""))

    assert guarded(scenario).code == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("path", ["x", "/", "//", "/" + "long" * 1000, "/a b/c\td"])
def test_what_is_no_name_of_a_method_is_refused_in_a_short_line(path, caplog):
    """A name without a slash was a fault of ours, with a traceback in the log for each call."""

    async def scenario(system):
        with_key = [("authorization", f"Bearer {KEY}")]
        call = system.channel.unary_unary(path)
        return [(await error_of(call(b"", metadata=metadata))).code for metadata in ([], with_key)]

    with caplog.at_level("INFO"):
        codes = guarded(scenario)
    assert codes == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED]
    (line,) = [record.getMessage() for record in caplog.records if "valid API key" in record.getMessage()]
    assert len(line) < 250 and line.isprintable()
    assert not [record for record in caplog.records if record.exc_info]


def test_the_same_key_guards_the_http_front():
    async def scenario(system):
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{system.router.http_port}") as client:
            keys = (None, "other", KEY)
            headers = [{"authorization": f"Bearer {key}"} if key else {} for key in keys]
            return [(await client.get("/v1/models", headers=header)).status_code for header in headers]

    assert guarded(scenario, http_port=0) == [401, 401, 200]


@pytest.mark.parametrize("key", ["schlüssel", "two words", "line\n"])
def test_a_key_that_no_header_can_hold_is_refused_at_start_and_by_the_client(key):
    with pytest.raises(ValueError, match="api-key: must be printable ASCII without blanks") as raised:
        RouterSettings(api_key=key)
    assert key not in str(raised.value)
    if key != "two words":
        with pytest.raises(InvalidArgumentError, match="api_key: must be printable ASCII"):
            Client(api_key=key)


def test_settings_do_not_show_it():
    assert KEY not in repr(RouterSettings(api_key=KEY))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, []),
        ({"host": "0.0.0.0", "http_port": 0}, ["gRPC on 0.0.0.0 asks nobody", "gRPC on 0.0.0.0 has no TLS"]),
        ({"http_host": "::", "http_port": 0, "api_key": KEY}, ["HTTP on :: has no TLS"]),
    ],
)
def test_a_port_that_others_reach_is_warned_about(settings, said, caplog):
    async def scenario(system):
        return None

    run_system(scenario, FakeWorker(says("a")), **settings)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [warning[: len(text)] for text, warning in zip(said, warnings, strict=True)] == said
