"""Answers fit the types of OpenAI's client, which does not check them itself."""

import asyncio

import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.fakes.system import until
from tests.fakes.worker import FakeWorker, says
from tests.router.http.front import chat, complete, events, run_front
from tests.router.http.test_chat import THINKS_AND_CALLS, knowing_tools


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

        num_tasks = len(asyncio.all_tasks())
        for _ in range(4):
            await asyncio.gather(*map(go, range(30)))
            await system.quiet()
            await until(lambda: len(asyncio.all_tasks()) <= num_tasks)

    run_front(scenario, FakeWorker(says("b" * 20), step_seconds=0.001))


async def answers_of_the_client(port):
    """The same answer with calls, as OpenAI's client gives it in each of its ways, to be sent back."""
    tools = [pydantic_function_tool(GetWeather, name="get_weather")]
    asked = {"model": "toy", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
        whole = await client.chat.completions.create(**asked)
        yield whole.choices[0].message.model_dump()
        yield whole.choices[0].message.model_dump(exclude_unset=True)
        parsed = await client.chat.completions.parse(**asked)
        assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")
        yield parsed.choices[0].message.model_dump()
        async with client.chat.completions.stream(**asked) as stream:
            final = await stream.get_final_completion()
        yield final.choices[0].message.model_dump()
        deltas = [c.choices[0].delta async for c in await client.chat.completions.create(**asked, stream=True)]
        yield collected(deltas)


def collected(deltas):
    """As many programs put a message together: the first delta of a call, and what is to be appended to it."""
    message = {"role": "assistant", "content": "", "function_call": None, "refusal": None, "tool_calls": []}
    for delta in deltas:
        message["content"] += delta.content or ""
        for call in delta.tool_calls or ():
            if call.index == len(message["tool_calls"]):
                message["tool_calls"].append(call.model_dump())
            else:
                message["tool_calls"][call.index]["function"]["arguments"] += call.function.arguments
    return message


class GetWeather(BaseModel):
    city: str


def test_answers_as_the_client_returns_them_may_be_sent_back():
    async def scenario(client, system):
        results = []
        async for message in answers_of_the_client(system.router.http_port):
            call = message["tool_calls"][0]["id"]
            back = [{"role": "user", "content": "a"}, message, {"role": "tool", "tool_call_id": call, "content": "sun"}]
            response = await client.post("/v1/chat/completions", json={"messages": back})
            results.append((response.status_code, response.text))
        return results

    results = run_front(scenario, FakeWorker(says(THINKS_AND_CALLS), files=knowing_tools()), chat_format="qwen3")
    assert [text for status, text in results if status != 200] == []
    assert len(results) == 5
