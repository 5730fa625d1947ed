"""Conversations and tools: what is refused, in exact words, and what is just allowed."""

import pytest

from fissile.errors import InvalidArgumentError
from fissile.v1 import BeamSearch, ChatMessage, ChatRequest, GenerationOptions, SamplingParams, Tool, ToolChoice
from router.asking.checks import Limits
from router.asking.validation import validate
from tests.router.asking.requests import (
    HELD,
    MIB,
    NAN,
    USER,
    bad_fields,
    borders,
    called,
    chat,
    choosing,
    faults,
    tools,
    variables,
)

BAD = [
    (ChatRequest(), "messages", "must not be empty"),
    (
        chat(ChatMessage(content="a")),
        "messages[0].role",
        "is CHAT_ROLE_UNSPECIFIED; a message needs a role, such as CHAT_ROLE_USER",
    ),
    (chat(ChatMessage(role=USER), ChatMessage(role=9)), "messages[1].role", "must be a known role, is 9"),
    (chat(ChatMessage(role=USER, content="a" * 57)), "messages", "must have at most 60 bytes encoded, has 61"),
    (called("[1]"), "messages[0].tool_calls[0].arguments", "must be a JSON object, is an array"),
    (tools(""), "tools[0].name", "must be 1 to 64 of a-z A-Z 0-9 _ . -, is ''"),
    (tools("get weather"), "tools[0].name", "must be 1 to 64 of a-z A-Z 0-9 _ . -, is 'get weather'"),
    (tools("a", "b", "a"), "tools[2].name", "must differ from entry 0, is 'a' too"),
    (choosing(mode=9), "tool_choice.mode", "must be a known mode, is 9"),
    (choosing(names=["f", "g"]), "tool_choice.names[1]", "is none of the tools: 'g'"),
    (chat(tool_choice=ToolChoice(mode=3)), "tools", "must not be empty where a call is required"),
    (choosing(options=GenerationOptions(min_tokens=1), mode=3), "options.min_tokens", HELD),
    (choosing(options=GenerationOptions(ignore_eos=True), single_call=True), "options.ignore_eos", HELD),
    (
        choosing(options=GenerationOptions(sampling=SamplingParams(beam_search=BeamSearch(width=2))), names=["f"]),
        "options.sampling.beam_search",
        HELD,
    ),
    (
        chat(tools=[Tool(name="f", parameters="3")]),
        "tools[0].parameters",
        "must be a JSON object, is a number",
    ),
    (variables(NAN), "template_arguments.a.b[1]", "must be finite, is nan"),
    (chat(chat_template="a" * (MIB + 1)), "chat_template", "must have at most 1048576 bytes, has 1048577"),
    (
        chat(options=GenerationOptions(sampling=SamplingParams(num_prompt_logprobs=0))),
        "options.sampling.num_prompt_logprobs",
        "Chat has none; use Generate",
    ),
]


@bad_fields(BAD)
def test_a_bad_field_is_named_with_value_and_limit(request_, field, words):
    assert faults(request_)[field] == words


GOOD = [
    chat(ChatMessage(role=USER, content="a" * 56)),
    called(""),
    called("{}"),
    tools("a" * 56),
    tools("get_weather.v-2"),
    choosing(mode=3, names=["f"], single_call=True),
    choosing(mode=2, options=GenerationOptions(min_tokens=1)),
    chat(tools=[Tool(name="f", parameters='{"type": "object"}')]),
    variables(1e308),
    chat(chat_template="a" * MIB),
]


@borders(GOOD)
def test_borders_are_allowed(request_):
    assert faults(request_) == {}


def test_the_longest_tool_name_has_64_characters():
    roomy = Limits(vocab_size=100, max_model_len=16, max_prompt_bytes=1000)
    validate(tools("a" * 64), roomy)
    with pytest.raises(InvalidArgumentError, match=r"tools\[0\].name"):
        validate(tools("a" * 65), roomy)
