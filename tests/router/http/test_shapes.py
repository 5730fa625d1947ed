"""Answers fit the types of OpenAI's client, which does not check them itself."""

import asyncio

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.fakes.worker import FakeWorker, says
from tests.router.http.front import chat, complete, events, run_front


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": 2}])
def test_completions(fields):
    Completion.model_validate(complete(FakeWorker(says("bc")), **fields).json())


@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}}])
def test_chunks_of_completions(fields):
    """The client has one type for both, and a chunk has no end yet."""
    for chunk in events(complete(FakeWorker(says("bc")), stream=True, logprobs=1, **fields)):
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(chunk)


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": True, "top_logprobs": 2}])
def test_chats(fields):
    ChatCompletion.model_validate(chat(FakeWorker(says("bc")), **fields).json())


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}])
def test_chunks_of_chats(fields):
    for chunk in events(chat(FakeWorker(says("bc")), stream=True, **fields)):
        ChatCompletionChunk.model_validate(chunk)


def test_models():
    async def scenario(client, system):
        return (await client.get("/v1/models/toy")).json()

    Model.model_validate(run_front(scenario, FakeWorker(says("b"))))


def test_mixed_traffic_leaves_nothing():
    """Whole and streamed answers, refusals, and clients that go, again and again."""

    async def scenario(client, system):
        async def go(number):
            body = {"prompt": "a", "max_tokens": 10, "stream": number % 2 == 0, "top_p": 2 if number % 5 == 0 else 1}
            if number % 3:
                await client.post("/v1/completions", json=body)
                return
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())

        async def round_of_requests():
            await asyncio.gather(*map(go, range(30)))
            await system.quiet()
            await asyncio.sleep(0.1)
            return len(asyncio.all_tasks())

        return [await round_of_requests() for _ in range(4)]

    first, *_, last = run_front(scenario, FakeWorker(says("b" * 20), step_seconds=0.001))
    assert last == first
