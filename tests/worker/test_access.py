"""Who may call what on the worker's port, by key and by certificate."""

import logging

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fissile import v1
from fissile.channel import KeyedChannel, aio_channel
from fissile.errors import from_rpc_error
from fissile.v1 import WorkerServiceStub
from tests.fakes.certificates import Authority
from tests.worker.harness import run_worker
from worker.config import WorkerSettings

ROUTER_KEY, OPERATOR_KEY = "router-router-router", "operator-operator-op"
NEXT_ROUTER_KEY = "router-router-next"
KEYS = {"router_key": f"{ROUTER_KEY}, {NEXT_ROUTER_KEY}", "operator_key": OPERATOR_KEY}

UNARY = {
    "GetWorker": v1.GetWorkerRequest(),
    "GetLoad": v1.GetLoadRequest(),
    "ClearPrefixCache": v1.ClearPrefixCacheRequest(),
    "StartProfile": v1.StartProfileRequest(),
    "StopProfile": v1.StopProfileRequest(),
    "Drain": v1.DrainRequest(),
    "Undrain": v1.UndrainRequest(),
}
STREAMS = {"GetTokenizer": v1.GetTokenizerRequest(), "WatchKvEvents": v1.WatchKvEventsRequest()}
FOR_ROUTERS = {"Execute", "GetWorker", "GetTokenizer", "GetLoad", "WatchKvEvents"}
IN_ORDER = ("Execute", *STREAMS, *UNARY)
ALL = set(IN_ORDER)


async def served(channel) -> set[str]:
    """Methods that a caller with this channel may call; the others must say why not."""
    stub = WorkerServiceStub(channel)
    found = set()
    for name in IN_ORDER:
        try:
            if name in UNARY:
                await getattr(stub, name)(UNARY[name], timeout=10)
            elif name in STREAMS:
                assert await getattr(stub, name)(STREAMS[name], timeout=10).read() is not grpc.aio.EOF
            else:
                call = stub.Execute(timeout=10)
                await call.done_writing()
                assert await call.read() is not None
            found.add(name)
        except grpc.aio.AioRpcError as error:
            assert error.code().name in ("UNAUTHENTICATED", "PERMISSION_DENIED"), from_rpc_error(error)
    return found


def served_with(keys: list[str], **settings) -> list[set[str]]:
    async def scenario(system):
        result = []
        for key in keys:
            async with aio_channel(system.address) as channel:
                result.append(await served(KeyedChannel(channel, key)))
        return result

    return run_worker(scenario, **settings)


def test_keys_of_routers_and_operators():
    assert set(v1.worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods_by_name) == ALL
    callers = ["", "other-other-other-oth", ROUTER_KEY, NEXT_ROUTER_KEY, OPERATOR_KEY]
    assert served_with(callers, **KEYS) == [set(), set(), FOR_ROUTERS, FOR_ROUTERS, ALL]


def test_nobody_operates_where_only_routers_have_a_key():
    assert served_with(["", ROUTER_KEY], router_key=ROUTER_KEY) == [set(), FOR_ROUTERS]


def test_without_keys_all_who_connect_may_do_everything():
    assert served_with([""]) == [ALL]


def test_names_in_certificates(tmp_path):
    ours = Authority(tmp_path / "ours")
    server = ours.server(mutual=True)
    settings = {
        "tls_certificate": server.certificate,
        "tls_key": server.key,
        "tls_client_ca": server.client_ca,
        "router_names": ["router.example", "10.0.0.7"],
        "operator_names": ["admin.example"],
    }

    async def scenario(system):
        result = {}
        for name in ("router.example", "10.0.0.7", "admin.example", "client.example"):
            async with aio_channel(system.address, ours.client(with_certificate=True, name=name)) as channel:
                result[name] = await served(channel)
        return result

    assert run_worker(scenario, **settings) == {
        "router.example": FOR_ROUTERS,
        "10.0.0.7": FOR_ROUTERS,
        "admin.example": ALL,
        "client.example": set(),
    }


def test_health_and_reflection_are_for_all_and_channelz_for_operators():
    async def scenario(system):
        async with aio_channel(system.address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            services = [service.name for service in (await anext(aiter(call))).list_services_response.service]
            codes = []
            for key in ("", ROUTER_KEY, OPERATOR_KEY):
                stub = channelz_pb2_grpc.ChannelzStub(KeyedChannel(channel, key))
                try:
                    await stub.GetServers(channelz_pb2.GetServersRequest())
                    codes.append("OK")
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code().name)
        return health.status, services, codes

    status, services, codes = run_worker(scenario, channelz=True, **KEYS)
    assert status == health_pb2.HealthCheckResponse.SERVING
    assert "grpc.channelz.v1.Channelz" in services
    assert codes == ["UNAUTHENTICATED", "PERMISSION_DENIED", "OK"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ["asks nobody who they are: anyone who reaches it may drain this worker", "has no TLS"]),
        ({"router_key": ROUTER_KEY}, ["has no TLS"]),
    ],
    ids=["open", "with a key"],
)
def test_a_port_that_others_reach_is_warned_about(settings, said, caplog):
    async def scenario(system):
        return None

    run_worker(scenario, host="0.0.0.0", **settings)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(said)
    assert all(text in warning for text, warning in zip(said, warnings, strict=True))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"router_names": ["a"]}, "--router-names and --operator-names need --tls-client-ca"),
        ({"router_key": f"{ROUTER_KEY},short"}, "--router-key: must be at least 16 printable ASCII characters"),
        ({"operator_key": "with blanks in between"}, "--operator-key: must be at least 16 printable"),
    ],
)
def test_settings_that_would_not_act_are_refused(settings, said):
    with pytest.raises(ValueError, match=said) as raised:
        WorkerSettings(**settings)
    assert "short" not in str(raised.value) and "in between" not in str(raised.value)
