"""A router that stops under load: whatever comes has an answer or UNAVAILABLE, which clients try again elsewhere."""

import asyncio

import grpc
import pytest

from fissile.v1 import GenerateRequest, TokenizeRequest
from tests.fakes.system import collect, run_system
from tests.fakes.worker import FakeWorker, says

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
