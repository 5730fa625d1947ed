"""One hostile client of each kind beside an ordinary one, which gets all that it asks for. `make bench-hostile` says
how soon."""

import asyncio
from contextlib import suppress

import grpc
import pytest

from fissile.v1 import GenerateRequest, GenerationOptions, GenerationServiceStub
from tests.fakes.system import collect, run_system
from tests.fakes.worker import FakeWorker, counts

GENERATE = "/fissile.v1.GenerationService/Generate"
NUM_REQUESTS = 10


def key(name):
    return [("authorization", f"Bearer {name * 16}")]


def ask(**options):
    return GenerateRequest(text="a", options=GenerationOptions(ignore_eos=True, **options))


def large(number):
    return bytes([number << 3 | 2, 0]) * 500_000


async def drain(call):
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass


async def tiny_requests(stub, channel):
    await asyncio.gather(*(drain(stub.Generate(ask(max_tokens=n % 2), metadata=key("h"))) for n in range(200)))


async def many_fields(stub, channel):
    call = channel.unary_stream(GENERATE)
    prompts = GenerateRequest.DESCRIPTOR.fields_by_name["prompts"].number
    await asyncio.gather(*(drain(call(large(prompts), metadata=key("h"))) for _ in range(8)))


async def large_texts(stub, channel):
    request = GenerateRequest(text="What does it cost? " * 20_000)
    await asyncio.gather(*(drain(stub.Generate(request, metadata=key("h"))) for _ in range(8)))


async def many_logprobs(stub, channel):
    request = ask(n=64, max_tokens=5, sampling={"num_logprobs": 64})
    await asyncio.gather(*(drain(stub.Generate(request, metadata=key("h"))) for _ in range(2)))


async def stalled_readers(stub, channel):
    request = ask(max_tokens=2000, sampling={"num_logprobs": 64})
    calls = [stub.Generate(request, metadata=key("h")) for _ in range(100)]
    try:
        await asyncio.sleep(0.5)
    finally:
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("attack", [tiny_requests, many_fields, large_texts, many_logprobs, stalled_readers])
def test_another_client_gets_all_that_it_asks_for(attack, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[keys]]\nname = "{name}"\nsecret = "{name * 16}"\n' for name in "ho"))
    worker = FakeWorker(counts(2000), step_seconds=0.005, max_model_len=3000)

    async def scenario(system):
        stub = GenerationServiceStub(system.channel)

        async def again_and_again():
            while True:
                await attack(stub, system.channel)

        hostile = asyncio.create_task(again_and_again())
        await asyncio.sleep(0.05)
        calls = [collect(stub.Generate(ask(max_tokens=3), metadata=key("o"))) for _ in range(NUM_REQUESTS)]
        answers = [await call for call in calls]
        is_over = hostile.done()
        hostile.cancel()
        await asyncio.gather(hostile, return_exceptions=True)
        await system.quiet()
        assert not system.router.parts.admission.held_bytes._held
        return [answer.usage.num_completion_tokens for answer in answers], is_over

    assert run_system(scenario, worker, api_key_file=keys, max_open_requests=100) == ([3] * NUM_REQUESTS, False)
