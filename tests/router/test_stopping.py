"""A router that stops under load: whatever comes has an answer or UNAVAILABLE, which clients try again elsewhere."""

import asyncio

import grpc
import pytest

from fissile.v1 import GenerateRequest, TokenizeRequest
from tests.fakes.system import collect, run_system, until
from tests.fakes.worker import FakeWorker, counts, says
from tests.router.http.front import run_front

NUM_CLIENTS = 40


@pytest.mark.parametrize("method", ["generate", "tokenize"])
def test_calls_that_come_while_a_router_stops_are_unavailable(method):
    async def scenario(system):
        async def ask():
            if method == "generate":
                await collect(system.stub.Generate(GenerateRequest(text="a")))
            else:
                await system.stub.Tokenize(TokenizeRequest(text="a"))

        async def client():
            """Until the router refuses."""
            while True:
                try:
                    await ask()
                except grpc.aio.AioRpcError as error:
                    return error.code(), error.details()

        clients = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
        await asyncio.sleep(0.3)
        await system.router.stop()
        return await asyncio.gather(*clients)

    ends = run_system(scenario, FakeWorker(says("x"), step_seconds=1e-3))
    assert {code for code, _ in ends} == {grpc.StatusCode.UNAVAILABLE}, ends


def test_answers_over_http_end_their_connections_while_a_router_stops():
    """A load balancer of connections cannot take an open one elsewhere."""
    worker = FakeWorker(counts(60), step_seconds=0.05)

    async def scenario(client, system):
        path, body = "/v1/completions", {"prompt": "a", "max_tokens": 60}
        before = await client.post(path, json={**body, "max_tokens": 1})
        first = asyncio.create_task(client.post(path, json=body))
        await until(lambda: len(system.router.parts.open_requests))
        stopping = asyncio.create_task(system.router.stop())
        await until(lambda: not system.router.is_ready)
        second = await client.post(path, json=body)
        worker.step_seconds = 0.0
        await stopping
        return before, await first, second

    before, first, second = run_front(scenario, worker)
    assert [answer.status_code for answer in (before, first, second)] == [200, 200, 503]
    assert [answer.headers.get("connection") for answer in (before, second)] == [None, "close"]
