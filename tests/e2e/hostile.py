"""Requests that no client should be able to hurt another one with. Each is a row of `HOSTILE`: it sends, and says what
must come back. What is refused must be refused by name."""

import contextlib
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from fissile import Client
from fissile.channel import channel
from fissile.cli.cluster import Cluster
from fissile.errors import FissileError, from_rpc_error
from fissile.v1 import ChatRequest, ExecuteRequest, GenerateRequest, GenerationOptions, GenerationServiceStub
from tests.fakes.deep import delimited, nested_arguments, schema_chain

ROUTER_CALLS = "/fissile.v1.GenerationService/"
MIB = 1024 * 1024
Attack = Callable[[Cluster], None]


def refused(cluster: Cluster, said: str, code: str = "INVALID_ARGUMENT", **options: object) -> None:
    with Client(cluster.router_address) as client:
        try:
            client.generate("x", **options).result()
        except FissileError as error:
            assert error.code.name == code and said in str(error), error
            return
    raise AssertionError("it was not refused")


def raw_refused(address: str, method: str, raw: bytes, said: str, code: str = "INVALID_ARGUMENT") -> None:
    """`raw` as the request of a call with a stream of answers."""
    with channel(address) as connection:
        try:
            list(connection.unary_stream(method)(raw, timeout=30))
        except grpc.RpcError as error:
            assert error.code().name == code and said in error.details(), error
            assert len(error.details()) < 2000
            return
    raise AssertionError("it was not refused")


def http_refused(cluster: Cluster, body: bytes, said: str, status: int = 400) -> None:
    request = urllib.request.Request(
        f"{cluster.http_address}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    try:
        urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        answer = error.read()
        assert error.code == status and said in answer.decode() and len(answer) < 5000, (error.code, answer[:2000])
        return
    raise AssertionError("it was not refused")


def chat_body(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4} | fields).encode()


def response_format(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def deep_schema_over_http(cluster: Cluster) -> None:
    """E1: it killed every worker."""
    for link in (lambda next: {"allOf": [next]}, lambda next: {"type": "array", "items": next}):
        http_refused(cluster, chat_body(response_format=response_format(schema_chain(2000, link))), "nested too deeply")


def deep_rules(cluster: Cluster) -> None:
    text = "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(20_000)) + 'r20000: "x"\n'
    refused(cluster, "nested too deeply", grammar=text)
    refused(cluster, "options.sampling.structured_output.regex", regex="(" * 20_000 + "x" + ")" * 20_000)


def grammar_that_takes_too_long(cluster: Cluster) -> None:
    """40 kB: seconds, and 2 GB."""
    refused(cluster, "too", regex="a?" * 20_000)
    refused(cluster, "too", regex="a?" * 20_001)


def many_grammars(cluster: Cluster) -> None:
    with ThreadPoolExecutor(16) as threads:
        for future in [threads.submit(refused, cluster, "regex", regex=f"({i}") for i in range(64)]:
            future.result()


def nested_structs(cluster: Cluster) -> None:
    """E2: 4 kB, and the router was gone."""
    raw_refused(cluster.router_address, f"{ROUTER_CALLS}Chat", nested_arguments(333), "template_arguments")


def deep_json(cluster: Cluster) -> None:
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    for field in (b"chat_template_kwargs", b"messages", b"tools"):
        http_refused(cluster, b'{"messages":[{"role":"user","content":"x"}],"%s":%s}' % (field, deep), "nested deeper")
    http_refused(cluster, b"[" * 1_000_000, "at most 100000 objects")
    http_refused(cluster, b"[" * 90_000, "no valid JSON")
    refused(cluster, "nested too deeply", json_schema='{"items":' * 5000 + "{}" + "}" * 5000)


def empty_messages(cluster: Cluster) -> None:
    """E5: 6 MB on the wire, three million messages, in 16 requests at a time."""
    lists = [(ChatRequest, "messages", "Chat"), (GenerateRequest, "prompts", "Generate")]
    with ThreadPoolExecutor(16) as threads:
        calls = []
        for request, field, method in lists * 8:
            raw = delimited(request.DESCRIPTOR.fields_by_name[field].number, b"") * 3 * MIB
            said = f"{field}: with it the request has more than 131072 fields"
            calls.append(threads.submit(raw_refused, cluster.router_address, ROUTER_CALLS + method, raw, said))
        for call in calls:
            call.result()


def empty_commands(cluster: Cluster) -> None:
    """The same for workers."""
    raw = delimited(ExecuteRequest.DESCRIPTOR.fields_by_name["commands"].number, b"") * 8 * MIB
    for address in cluster.workers.values():
        raw_refused(address, "/fissile.v1.WorkerService/Execute", raw, "commands: with it the request has more")


def empty_objects(cluster: Cluster) -> None:
    for values, said in (
        ([b"{}"] * MIB, "at most 100000 objects"),
        ([b"1"] * 6 * MIB, "at most 250000 values"),
        ([b"1.5"] * 3 * MIB, "at most 250000 values"),
    ):
        http_refused(cluster, b'{"messages":[%s]}' % b",".join(values), said)


def bad_tools(cluster: Cluster) -> None:
    tools = [{"type": "x", "function": 1, "more": "y" * 200}] * 20_000
    http_refused(cluster, chat_body(tools=tools), "tools[0]")
    http_refused(cluster, chat_body(stop=[1] * 200_000), "stop[0]")


def large_requests(cluster: Cluster) -> None:
    number = GenerateRequest.DESCRIPTOR.fields_by_name["text"].number
    raw_refused(cluster.router_address, f"{ROUTER_CALLS}Generate", delimited(number, b"x" * 8 * MIB), "text: must have")
    with contextlib.suppress(urllib.error.URLError, OSError):  # it may hang up before all is sent
        http_refused(cluster, b" " * 20 * MIB, "the body is longer than", 413)


def schema_for_each_of_many(cluster: Cluster) -> None:
    """E3: 128 times 600 kB would not fit into one message between the services. Its end is a refusal, so that the model
    has nothing to do."""
    schema = json.dumps({"not": {}, "enum": ["x" * 600] * 1000})
    refused(cluster, "options.sampling.structured_output.json_schema", n=128, json_schema=schema, max_tokens=1)


def impossible_lengths(cluster: Cluster) -> None:
    """E4: 30 times 128 refusals."""
    with ThreadPoolExecutor(30) as threads:
        options = {"n": 128, "min_tokens": 4_000_000_000}
        for future in [threads.submit(refused, cluster, "min_tokens", **options) for _ in range(30)]:
            future.result()


def thousands_at_once(cluster: Cluster) -> None:
    """E7: gRPC cancelled some of them. Half ask for what nobody can have, so that the model has little to do."""
    codes: Counter[str] = Counter()
    request = GenerateRequest(text="x", options=GenerationOptions(max_tokens=0))
    with channel(cluster.router_address) as connection:
        stub = GenerationServiceStub(connection)
        for call in [stub.Generate(request) for _ in range(2000)]:
            try:
                list(call)
            except grpc.RpcError as error:
                codes[error.code().name] += 1
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    assert from_rpc_error(error).retry_after is not None
    assert codes.keys() <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"} and codes.total() == 2000, codes


def garbage_for_workers(cluster: Cluster) -> None:
    """E8."""
    for address in cluster.workers.values():
        with channel(address) as connection:
            execute = connection.stream_stream("/fissile.v1.WorkerService/Execute")
            try:
                list(execute(iter([b"\xff" * 1000]), timeout=10))
                raise AssertionError("it was not refused")
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error


def extreme_values(cluster: Cluster) -> None:
    vocab_size = 49_152
    refused(cluster, "options.sampling.logit_bias", logit_bias={vocab_size + 40: 1.0})
    refused(cluster, "options.stop_token_ids", stop_token_ids=[2**32 - 1])
    refused(cluster, "options.sampling.temperature", temperature=float("nan"))
    refused(cluster, "options.sampling.allowed_token_ids", allowed_token_ids=[vocab_size])
    with Client(cluster.router_address) as client:
        options = {"seed": 2**64 - 1, "top_k": 2**31 - 1, "priority": -(2**31), "temperature": 100.0, "top_p": 1e-30}
        assert client.generate("x", max_tokens=2, ignore_eos=True, **options).result().usage.num_completion_tokens == 2


def slow_readers(cluster: Cluster) -> None:
    """They ask for much and read nothing."""
    request = GenerateRequest(text="x", options=GenerationOptions(max_tokens=100, ignore_eos=True))
    request.options.sampling.num_logprobs = 64
    with channel(cluster.router_address) as connection:
        calls = [GenerationServiceStub(connection).Generate(request) for _ in range(4)]
        time.sleep(1)
        for call in calls:
            call.cancel()


def clients_that_leave(cluster: Cluster) -> None:
    for _ in range(5):
        with channel(cluster.router_address) as connection:
            stub = GenerationServiceStub(connection)
            request = GenerateRequest(text="x", options=GenerationOptions(max_tokens=1000, ignore_eos=True))
            calls = [stub.Generate(request) for _ in range(20)]
            for call in calls[:10]:
                call.cancel()


def bytes_that_are_no_protocol(cluster: Cluster) -> None:
    addresses = [cluster.router_address, *cluster.workers.values(), (cluster.http_address or "").rpartition("/")[2]]
    for address in addresses:
        host, _, port = address.rpartition(":")
        for garbage in (os.urandom(MIB), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(512), b"POST / HTTP/1.1\r\n"):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(garbage)


HOSTILE: list[Attack] = [
    deep_schema_over_http,
    deep_rules,
    grammar_that_takes_too_long,
    many_grammars,
    nested_structs,
    deep_json,
    empty_messages,
    empty_commands,
    empty_objects,
    bad_tools,
    large_requests,
    schema_for_each_of_many,
    impossible_lengths,
    thousands_at_once,
    garbage_for_workers,
    extreme_values,
    slow_readers,
    clients_that_leave,
    bytes_that_are_no_protocol,
]
