"""litellm, which speaks for many others: completions, streams, tools, structured output, errors."""

import asyncio
import json

import litellm
import pytest
from asked import ANSWER, MODEL, QUESTION, TOOL, City

OPTIONS = {"model": f"openai/{MODEL}", "messages": QUESTION, "temperature": 0, "max_tokens": 64, "num_retries": 0}


def test_a_chat():
    answer = litellm.completion(**OPTIONS)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.usage.completion_tokens == 8


def test_a_name_that_it_knows_from_elsewhere():
    """It looks such a model's abilities and prices up, and sends what that model takes."""
    assert litellm.completion(**OPTIONS | {"model": "gpt-4o"}).choices[0].message.content == ANSWER


def test_a_stream_is_the_same():
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **OPTIONS))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 8


def test_an_asynchronous_stream():
    async def ask():
        stream = await litellm.acompletion(stream=True, **OPTIONS)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == ANSWER


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_made(choice, stream):
    # With `required` alone a model may make several calls.
    options = OPTIONS | ({"parallel_tool_calls": False} if choice == "required" else {})
    answer = litellm.completion(tools=[TOOL], tool_choice=choice, stream=stream, **options)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "look_up"
    assert City(**json.loads(call.function.arguments))


def test_a_tool_that_may_be_called():
    options = OPTIONS | {"max_tokens": 4}
    assert litellm.completion(tools=[TOOL], tool_choice="auto", **options).choices[0].message


def test_structured_output():
    answer = litellm.completion(response_format=City, **OPTIONS)
    assert City.model_validate_json(answer.choices[0].message.content)


def test_an_error_keeps_its_kind():
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**OPTIONS | {"model": "openai/other"})
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(top_p=2, **OPTIONS)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(api_key="wrong", **OPTIONS)
