"""langchain-openai: chat, streams, tools, structured output."""

import asyncio
from typing import Literal

import pytest
from asked import ANSWER, MODEL, QUESTION, City
from langchain_core.messages import AIMessage, ToolMessage, convert_to_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI


@tool
def look_up(name: Literal["Paris", "Rome"]) -> str:
    """Look up a city."""
    return f"{name} is a capital."


def chat(**options):
    return ChatOpenAI(**{"model": MODEL, "temperature": 0, "max_tokens": 64, "max_retries": 0, **options})


def test_a_chat():
    answer = chat().invoke(QUESTION)
    assert (answer.content, answer.response_metadata["finish_reason"]) == (ANSWER, "stop")
    assert answer.usage_metadata["output_tokens"] == 8


def test_a_stream_is_the_same():
    parts = list(chat(stream_usage=True).stream(QUESTION))
    assert "".join(part.content for part in parts) == ANSWER
    assert sum((part.usage_metadata or {}).get("output_tokens", 0) for part in parts) == 8


def test_several_at_once():
    answers = asyncio.run(chat(max_tokens=2).abatch([QUESTION] * 4))
    assert [answer.content for answer in answers] == ["The capital"] * 4


def test_a_completion():
    text = OpenAI(model=MODEL, temperature=0, max_tokens=2, max_retries=0).invoke("The capital of France is")
    assert " Paris" in text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(method):
    assert isinstance(chat().with_structured_output(City, method=method).invoke(QUESTION), City)


@pytest.mark.parametrize("choice", ["look_up", "any"])
def test_a_call_that_must_be_made(choice):
    tools = chat().bind_tools([look_up], tool_choice=choice, parallel_tool_calls=False, strict=True)
    answer = tools.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert look_up.invoke(call).content in ("Paris is a capital.", "Rome is a capital.")


def test_a_call_that_must_be_made_in_a_stream():
    whole, *parts = chat().bind_tools([City], tool_choice="City").stream(QUESTION)
    for part in parts:
        whole += part
    (call,) = whole.tool_calls
    assert City(**call["args"])


def test_a_conversation_with_a_call_and_its_result():
    call = {"id": "c", "name": "look_up", "args": {"name": "Paris"}}
    messages = [
        *convert_to_messages(QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage(look_up.invoke(call["args"]), tool_call_id="c"),
    ]
    assert chat(max_tokens=4).bind_tools([look_up]).invoke(messages).content
