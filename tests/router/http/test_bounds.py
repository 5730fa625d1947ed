"""Clients that are slow on purpose, or many, over real sockets: each loses its connection, and nobody else notices."""

import asyncio
import json
import socket
import threading
import tracemalloc
from contextlib import asynccontextmanager

import pytest
import uvicorn

from router.admission.budget import Budget
from router.http import endpoints
from router.http.connections import ConnectionBounds
from router.http.middleware import BodyBounds, WholeBody, whole_body
from tests.fakes.system import until
from tests.fakes.worker import FakeWorker, counts
from tests.router.http.front import run_front

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
BODY = {"model": "toy", "prompt": "a", "max_tokens": 2}
MIB = 1 << 20


@asynccontextmanager
async def connection(system, host="127.0.0.1", receive_buffer=None):
    """From `host`."""
    with socket.socket() as client:
        client.setblocking(False)
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.bind((host, 0))
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", system.router.http_port))
        yield client


async def answer(client):
    """Status and error of all that comes until the other side hangs up."""
    loop, received = asyncio.get_running_loop(), b""
    while part := await asyncio.wait_for(loop.sock_recv(client, 65536), 20):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD, HEAD + b"{"])
def test_a_request_that_does_not_come_to_its_end_is_given_up(sent):
    async def scenario(client, system):
        async with connection(system) as slow:
            await asyncio.get_running_loop().sock_sendall(slow, sent)
            return await answer(slow)

    status, message = run_front(scenario, FakeWorker(counts(2)), receive_timeout=0.2)
    assert (status, message) == (408, "the request did not come within 0.2 s (receive-timeout)")


def test_a_connection_that_waits_for_the_next_request_is_kept():
    """And a client that drips the head of its second request is not."""

    async def scenario(client, system):
        first = await client.post("/v1/completions", json=BODY)
        await asyncio.sleep(0.5)
        second = await client.post("/v1/completions", json=BODY)
        async with connection(system) as slow:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(slow, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in await loop.sock_recv(slow, 65536)
            await loop.sock_sendall(slow, b"GET /hea")
            status, _ = await answer(slow)
        return first.status_code, second.status_code, status

    assert run_front(scenario, FakeWorker(counts(2)), receive_timeout=0.3) == (200, 200, 408)


def test_one_host_does_not_get_all_connections():
    async def scenario(client, system):
        async with connection(system), connection(system), connection(system), connection(system):
            async with connection(system) as fifth:
                refused = await answer(fifth)
            async with connection(system, host="127.0.0.2") as other:
                await asyncio.get_running_loop().sock_sendall(other, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                served = await asyncio.get_running_loop().sock_recv(other, 100)
        await until(lambda: not system.router.parts.admission.connections.num_taken)
        return refused, served

    (status, message), served = run_front(scenario, FakeWorker(counts(2)), max_connections=5)
    assert (status, served[:15]) == (429, b"HTTP/1.1 200 OK")
    assert message == "connections: 4 of 5 are taken, 4 of them by this client, and 1 more are wanted (max-connections)"


def test_a_stalled_reader_loses_its_connection():
    worker = FakeWorker(counts(60_000), step_seconds=0.0, tokens_per_step=100, max_model_len=100_000, mute_after=50_000)

    async def scenario(client, system):
        async with connection(system, receive_buffer=4096) as stalled:
            body = json.dumps({**BODY, "max_tokens": 60_000, "stream": True, "logprobs": 5}).encode()
            head = HEAD.replace(b"1000", str(len(body)).encode())
            await asyncio.get_running_loop().sock_sendall(stalled, head + body)
            await until(lambda: system.router.parts.metrics.finished)
        await system.quiet()
        return dict(system.router.parts.metrics.finished), len(worker.aborted)

    ends, num_aborted = run_front(scenario, worker, write_timeout=0.5, max_message_rate=1e9)
    assert (ends, num_aborted) == ({"cancelled": 1}, 1)


def test_an_answer_too_large_to_be_sent_whole_is_refused(monkeypatch):
    monkeypatch.setattr(endpoints, "MAX_WHOLE_BYTES", 500_000)

    async def scenario(client, system):
        body = {**BODY, "logprobs": 5, "n": 32}
        sizes = [100, 250]  # below and above
        whole = [await client.post("/v1/completions", json={**body, "max_tokens": size}) for size in sizes]
        stream = await client.post("/v1/completions", json={**body, "max_tokens": 250, "stream": True})
        await system.quiet()
        return whole, stream

    whole, stream = run_front(scenario, FakeWorker(counts(300), step_seconds=0.0, tokens_per_step=50))
    assert [response.status_code for response in whole] == [200, 429]
    assert len(whole[0].json()["choices"][31]["logprobs"]["tokens"]) == 100
    assert "as a stream it may take any number" in whole[1].json()["error"]["message"]
    assert stream.text.endswith("data: [DONE]\n\n")


def test_bodies_are_held_within_a_budget():
    async def scenario(client, system):
        refused = await client.post("/v1/completions", json={**BODY, "prompt": "a" * 20_000})
        served = await client.post("/v1/completions", json=BODY)
        await until(lambda: not system.router.parts.admission.held_bytes.num_taken)
        return refused, served

    refused, served = run_front(scenario, FakeWorker(counts(2)), max_held_bytes=10_000)
    assert (refused.status_code, served.status_code) == (429, 200)
    assert "max-held-bytes" in refused.json()["error"]["message"]


@pytest.mark.parametrize("made", ["parse_body", "completion_request"])
def test_while_a_large_body_is_read_others_are_served(monkeypatch, made):
    make, is_served, is_held = getattr(endpoints, made), threading.Event(), threading.Event()

    def slowly(body, *arguments):
        if len(body if made == "parse_body" else body.prompt[0]) > 100_000:
            is_held.set()
            assert is_served.wait(20)
        return make(body, *arguments)

    monkeypatch.setattr(endpoints, made, slowly)

    async def scenario(client, system):
        large = asyncio.create_task(client.post("/v1/completions", json={**BODY, "prompt": "a" * 200_000}))
        await until(is_held.is_set)
        small = await client.post("/v1/completions", json=BODY)
        is_served.set()
        return small.status_code, (await large).status_code

    worker = FakeWorker(counts(2), max_model_len=300_000)
    assert run_front(scenario, worker) == (200, 200)


def test_connections_of_one_network_are_those_of_one_host():
    """Of IPv6, where each has more addresses than there are connections."""
    budget = Budget(100, "connections", "max-connections")

    class Transport:
        def __init__(self, address):
            self.address = address

        def get_extra_info(self, name, default=None):
            return (self.address, 4711) if name == "peername" else default

        def close(self):
            pass

    async def scenario():
        make = ConnectionBounds(budget, 30.0).protocol()
        config = uvicorn.Config(lambda: None, log_config=None)
        config.load()
        for number in range(3):
            connection = make(config, uvicorn.server.ServerState(), {})
            connection.connection_made(Transport(f"2001:db8:1:2::{number}"))

    asyncio.run(scenario())
    assert budget.held_by("2001:db8:1:2::/64") == 3


def test_a_large_body_is_held_once():
    """Each further copy of 12 MiB would hold up all others for as long as it takes to make."""
    part, num_parts = bytes(MIB), 12
    numbers = iter(range(1, num_parts + 1))

    async def receive():
        if (number := next(numbers, None)) is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bytes(bytearray(part)), "more_body": number < num_parts}

    async def app(_scope, receive, _send):
        body = await whole_body(receive)
        sizes.append(len(body))
        # The thread that joined it lets go of the parts a moment later.
        await until(lambda: tracemalloc.get_traced_memory()[0] < 1.1 * num_parts * MIB)

    sizes, bounds = [], BodyBounds(16 * MIB, Budget(64 * MIB, "bytes", "max-held-bytes"), receive_timeout=20)
    tracemalloc.start()
    try:
        asyncio.run(WholeBody(app, bounds)({"client": None}, receive, None))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sizes == [num_parts * MIB]
    assert most < 2.1 * num_parts * MIB  # while its parts are joined


def test_a_body_in_the_smallest_parts_takes_no_more_than_its_bytes():
    """As many objects as parts would take 50 bytes more for each, which no budget counts."""
    parts = [(b"%03d" % (i % 1000)) for i in range(20_000)] + [b"x" * 5000, b"end"]
    numbers = iter(range(len(parts)))

    async def receive():
        if (number := next(numbers, None)) is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bytes(bytearray(parts[number])), "more_body": number < len(parts) - 1}

    async def app(_scope, receive, _send):
        bodies.append(await whole_body(receive))

    bodies, bounds = [], BodyBounds(MIB, Budget(MIB, "bytes", "max-held-bytes"), receive_timeout=20)
    tracemalloc.start()
    try:
        asyncio.run(WholeBody(app, bounds)({"client": None}, receive, None))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bodies == [b"".join(parts)]
    assert most < 8 * len(bodies[0])
