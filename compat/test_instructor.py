"""instructor: typed answers through tools, a schema and any JSON."""

import asyncio

import instructor
import pytest
from asked import MODEL, QUESTION, City
from instructor import Mode
from openai import AsyncOpenAI, OpenAI

OPTIONS = {"model": MODEL, "response_model": City, "temperature": 0, "max_tokens": 64}
# A small model does not find out by itself which JSON is meant.
TOLD = [{"role": "user", "content": 'Answer with {"name": "Paris", "is_capital": true}.'}]


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.JSON])
def test_a_typed_answer(mode):
    client = instructor.from_openai(OpenAI(), mode=mode)
    messages = TOLD if mode is Mode.JSON else QUESTION
    assert isinstance(client.chat.completions.create(messages=messages, max_retries=0, **OPTIONS), City)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_a_typed_answer_as_it_grows(mode):
    client = instructor.from_openai(OpenAI(), mode=mode)
    *_, last = client.chat.completions.create_partial(messages=QUESTION, **OPTIONS)
    assert City(**last.model_dump())


def test_a_typed_answer_asynchronously():
    async def ask():
        async with AsyncOpenAI() as api:
            client = instructor.from_openai(api, mode=Mode.TOOLS)
            return await client.chat.completions.create(messages=QUESTION, max_retries=0, **OPTIONS)

    assert isinstance(asyncio.run(ask()), City)
