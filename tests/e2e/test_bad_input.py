"""Every line of bad input gets a clear status, and both services go on serving."""

import os
import socket

import grpc
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fissile import Client
from fissile.channel import channel
from fissile.errors import FissileError
from fissile.v1 import (
    ChatRequest,
    ExecuteRequest,
    GenerateRequest,
    GenerationServiceStub,
    GetStatsRequest,
    TokenizeRequest,
)
from tests import fuzzing

CASES = {
    "empty prompt": ({"prompt": ""}, "INVALID_ARGUMENT", "text"),
    "no tokens": ({"prompt": []}, "INVALID_ARGUMENT", "token"),
    "longer than the model": ({"prompt": [1] * 2048}, "INVALID_ARGUMENT", "2048"),
    "no room for max_tokens": ({"prompt": "x", "max_tokens": 0}, "INVALID_ARGUMENT", "options.max_tokens"),
    "negative temperature": ({"prompt": "x", "temperature": -1.0}, "INVALID_ARGUMENT", "options.sampling.temperature"),
    "top_p 2": ({"prompt": "x", "top_p": 2.0}, "INVALID_ARGUMENT", "options.sampling.top_p"),
    "token beyond the vocabulary": ({"prompt": [49152]}, "INVALID_ARGUMENT", "49152"),
    "10 MB prompt": ({"prompt": "x" * 10_000_000}, "INVALID_ARGUMENT", "10000000"),
    "unknown model": ({"prompt": "x", "model": "gpt-5"}, "NOT_FOUND", "gpt-5"),
}


@pytest.mark.parametrize("name", CASES)
def test_clear_status(client, name, idle):
    arguments, code, said = CASES[name]
    with pytest.raises(FissileError) as raised:
        client.generate(**arguments).result()
    assert raised.value.code.name == code
    assert said in str(raised.value)
    assert client.generate("still there", max_tokens=1).result().usage.num_completion_tokens == 1
    idle()


def test_all_faults_of_a_request_are_named_at_once(client):
    with pytest.raises(FissileError) as raised:
        client.generate("x", temperature=-1.0, top_p=2.0, max_tokens=0).result()
    assert {violation.field for violation in raised.value.violations} == {
        "options.sampling.temperature",
        "options.sampling.top_p",
        "options.max_tokens",
    }


def test_duplicate_request_id(client, idle):
    first = client.generate("Once upon a time", request_id="twice", max_tokens=500, ignore_eos=True)
    next(first)
    with pytest.raises(FissileError) as raised:
        client.generate("x", request_id="twice", max_tokens=1).result()
    assert raised.value.code.name == "ALREADY_EXISTS" and "twice" in str(raised.value)
    next(first)
    first.close()
    idle()


def test_invalid_utf8(cluster):
    with channel(cluster.router_address) as connection:
        call = connection.unary_stream("/fissile.v1.GenerationService/Generate")
        with pytest.raises(grpc.RpcError) as raised:
            list(call(b"\x1a\x03a\xff\xfe", timeout=5))  # field 3 (text), three bytes
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "text" in raised.value.details()


def test_bytes_that_are_no_message(cluster):
    with channel(cluster.router_address) as connection:
        call = connection.unary_stream("/fissile.v1.GenerationService/Generate")
        with pytest.raises(grpc.RpcError) as raised:
            list(call(b"\xff" * 64, timeout=5))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_garbage_on_the_ports(cluster, client, idle):
    for address in (cluster.router_address, *cluster.workers.values()):
        host, _, port = address.rpartition(":")
        for garbage in (
            os.urandom(4096),
            b"GET / HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(512),
        ):
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(garbage)
    assert client.generate("still there", max_tokens=1).result().usage.num_completion_tokens == 1
    idle()


def test_unknown_method(cluster):
    with channel(cluster.router_address) as connection:
        call = connection.unary_unary("/fissile.v1.GenerationService/Nothing")
        with pytest.raises(grpc.RpcError) as raised:
            call(b"", timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


MIB = 1024 * 1024
FUZZED = {"Generate": GenerateRequest, "Chat": ChatRequest, "Tokenize": TokenizeRequest, "GetStats": GetStatsRequest}
FOR_ROUTERS = st.lists(fuzzing.calls(FUZZED), min_size=10, max_size=10)
FOR_WORKERS = st.lists(fuzzing.raw(ExecuteRequest), min_size=10, max_size=10)


def code_of(call):
    try:
        list(call)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@fuzzing.examples(6)
@given(to_router=FOR_ROUTERS, to_workers=FOR_WORKERS)
def test_any_bytes_to_real_services(cluster, log, to_router, to_workers):
    """What is good enough to run has a second to."""
    may_come = {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, *fuzzing.REFUSALS}
    processes = [psutil.Process(child.pid) for child in (cluster.router, *cluster.workers)]
    num_lines, sizes = len(log), [process.memory_info().rss for process in processes]
    with channel(cluster.router_address) as connection:
        for method, raw in to_router:
            call = connection.unary_stream(f"/fissile.v1.GenerationService/{method}")(raw, timeout=1)
            assert code_of(call) in may_come, (method, raw[:1000])
    for address in cluster.workers.values():
        with channel(address) as connection:
            for raw in to_workers:
                execute = connection.stream_stream("/fissile.v1.WorkerService/Execute")
                assert code_of(execute(iter([raw]), timeout=1)) in may_come, raw[:1000]
    with Client(cluster.router_address) as client:
        assert client.generate("still there", max_tokens=1).result().usage.num_completion_tokens == 1
    assert not [line for line in log[num_lines:] if "ERROR" in line or "Traceback" in line]
    grown = [process.memory_info().rss - size for process, size in zip(processes, sizes, strict=True)]
    assert max(grown) < 100 * MIB, grown


def test_a_fault_does_not_reach_the_neighbours(cluster):
    with Client(cluster.router_address) as client, channel(cluster.router_address) as connection:
        stream = client.generate("Once upon a time", max_tokens=30, temperature=0.0, ignore_eos=True)
        next(stream)
        for _ in range(20):
            with pytest.raises(grpc.RpcError):
                list(GenerationServiceStub(connection).Generate(GenerateRequest()))
        assert stream.result().usage.num_completion_tokens == 30
