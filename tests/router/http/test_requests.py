"""JSON bodies as messages of the contract."""

import json

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from fissile.v1 import ChatRequest, GenerateRequest, ToolChoice
from router.http.bodies import CompletionBody
from router.http.chat_body import ChatBody
from router.http.json_body import parse_body
from router.http.requests import chat_names, chat_request, completion_names, completion_request

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def completion(**fields):
    body = parse_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)
    return completion_request(body, "id", 10.0)


def chat(**fields):
    body = parse_body(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode(), ChatBody)
    return chat_request(body, "id", 10.0)


def test_the_smallest_completion():
    assert completion() == ParseDict(
        {
            "request_id": "id",
            "text": "x",
            "add_special_tokens": True,
            "options": {
                "sampling": {},
                "max_tokens": 16,
                "output": {"final_only": True},
                "skip_special_tokens": True,
            },
        },
        GenerateRequest(),
    )


def test_the_smallest_chat_has_no_limit_of_tokens():
    assert chat() == ParseDict(
        {
            "request_id": "id",
            "messages": [{"role": "CHAT_ROLE_USER", "content": "x"}],
            "template_arguments": {},
            "options": {"sampling": {}, "output": {"final_only": True}, "skip_special_tokens": True},
        },
        ChatRequest(),
    )


def test_a_stream_has_deltas_and_a_heartbeat():
    assert MessageToDict(completion(stream=True).options.output) == {"heartbeat": "10s"}


OPTIONS = [
    ({"model": "m"}, {"model": "m"}),
    ({"max_tokens": 7}, {"options": {"max_tokens": 7}}),
    ({"min_tokens": 2}, {"options": {"min_tokens": 2}}),
    ({"n": 3}, {"options": {"n": 3}}),
    ({"stop": "a"}, {"options": {"stop": ["a"]}}),
    ({"stop": ["a", "b"]}, {"options": {"stop": ["a", "b"]}}),
    ({"stop_token_ids": [5]}, {"options": {"stop_token_ids": [5]}}),
    ({"include_stop_str_in_output": True}, {"options": {"include_stop": True}}),
    ({"ignore_eos": True}, {"options": {"ignore_eos": True}}),
    ({"skip_special_tokens": False}, {"options": {"skip_special_tokens": False}}),
    ({"bad_words": ["no"]}, {"options": {"bad_words": ["no"]}}),
    ({"priority": -3}, {"options": {"priority": -3}}),
    ({"cache_salt": "a"}, {"options": {"cache_salt": "YQ=="}}),
    ({"prompt_cache_key": "a"}, {"options": {"routing_key": "a"}}),
    ({"temperature": 0}, {"options": {"sampling": {"temperature": 0.0}}}),
    ({"top_p": 0.5}, {"options": {"sampling": {"top_p": 0.5}}}),
    ({"top_k": 4}, {"options": {"sampling": {"top_k": 4}}}),
    ({"min_p": 0.25}, {"options": {"sampling": {"min_p": 0.25}}}),
    ({"seed": 5}, {"options": {"sampling": {"seed": "5"}}}),
    ({"seed": -1}, {"options": {"sampling": {"seed": str(2**64 - 1)}}}),
    ({"presence_penalty": 1}, {"options": {"sampling": {"presence_penalty": 1.0}}}),
    ({"frequency_penalty": -1}, {"options": {"sampling": {"frequency_penalty": -1.0}}}),
    ({"repetition_penalty": 1.5}, {"options": {"sampling": {"repetition_penalty": 1.5}}}),
    ({"logit_bias": {"7": -100}}, {"options": {"sampling": {"logit_bias": [{"token_id": 7, "bias": -100.0}]}}}),
    ({"allowed_token_ids": [1]}, {"options": {"sampling": {"allowed_token_ids": [1]}}}),
    ({"banned_token_ids": [2]}, {"options": {"sampling": {"banned_token_ids": [2]}}}),
    ({"response_format": {"type": "text"}}, {}),
    (
        {"response_format": {"type": "json_object"}},
        {"options": {"sampling": {"structured_output": {"json_object": True}}}},
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        {"options": {"sampling": {"structured_output": {"json_schema": json.dumps(SCHEMA)}}}},
    ),
    (
        {"structured_outputs": {"json": SCHEMA}},
        {"options": {"sampling": {"structured_output": {"json_schema": json.dumps(SCHEMA)}}}},
    ),
    (
        {"structured_outputs": {"json": "true"}},
        {"options": {"sampling": {"structured_output": {"json_schema": "true"}}}},
    ),
    ({"structured_outputs": {"regex": "a+"}}, {"options": {"sampling": {"structured_output": {"regex": "a+"}}}}),
    (
        {"structured_outputs": {"grammar": "s: A"}},
        {"options": {"sampling": {"structured_output": {"grammar": "s: A"}}}},
    ),
    (
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"options": {"sampling": {"structured_output": {"choice": {"choices": ["a", "b"]}}}}},
    ),
]


@pytest.mark.parametrize("translate", [completion, chat])
@pytest.mark.parametrize(("fields", "expected"), OPTIONS, ids=[json.dumps(fields) for fields, _ in OPTIONS])
def test_options(translate, fields, expected):
    """Each sets its own field and no other."""
    wanted = translate()
    wanted.MergeFrom(ParseDict(expected, type(wanted)()))
    assert translate(**fields) == wanted


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": [5, 6]}, {"tokens": {"tokenIds": [5, 6]}}),
        ({"prompt": ["a", "b"]}, {"prompts": [{"text": "a"}, {"text": "b"}]}),
        ({"prompt": [[1], [2, 3]]}, {"prompts": [{"tokens": {"tokenIds": [1]}}, {"tokens": {"tokenIds": [2, 3]}}]}),
    ],
)
def test_prompts(fields, expected):
    sent = MessageToDict(completion(**fields))
    assert {name: sent[name] for name in expected} == expected
    assert sum(name in sent for name in ("text", "tokens", "prompts")) == 1


def test_no_special_tokens():
    assert completion(add_special_tokens=False).add_special_tokens is False


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": 0}, {"numLogprobs": 0}),
        ({"logprobs": 2}, {"numLogprobs": 2}),
        ({"logprobs": 2, "echo": True}, {"numLogprobs": 2, "numPromptLogprobs": 2}),
        ({"echo": True}, {}),
    ],
)
def test_logprobs_of_a_completion(fields, expected):
    request = completion(**fields)
    assert MessageToDict(request.options.sampling) == expected
    assert request.options.output.prompt_token_ids == ("numPromptLogprobs" in expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": True}, {"numLogprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"numLogprobs": 3}),
        ({"logprobs": False}, {}),
    ],
)
def test_logprobs_of_a_chat(fields, expected):
    assert MessageToDict(chat(**fields).options.sampling) == expected


def test_messages():
    sent = chat(
        messages=[
            {"role": "developer", "content": "d", "name": "boss"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "reasoning_content": "r",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "42"},
        ]
    ).messages
    assert [MessageToDict(message) for message in sent] == [
        {"role": "CHAT_ROLE_DEVELOPER", "content": "d", "name": "boss"},
        {"role": "CHAT_ROLE_USER", "content": "a\nb"},
        {
            "role": "CHAT_ROLE_ASSISTANT",
            "reasoning": "r",
            "toolCalls": [{"id": "c", "name": "f", "arguments": "{}"}],
        },
        {"role": "CHAT_ROLE_TOOL", "toolCallId": "c", "content": "42"},
    ]


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}


def test_tools():
    (tool,) = chat(tools=[TOOL], tool_choice="auto").tools
    assert (tool.name, tool.description, json.loads(tool.parameters)) == ("f", "d", SCHEMA)


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"parallel_tool_calls": True}, None),
        ({"tool_choice": "auto"}, {"mode": "TOOL_CHOICE_MODE_AUTO"}),
        ({"tool_choice": "required"}, {"mode": "TOOL_CHOICE_MODE_REQUIRED"}),
        ({"tool_choice": {"type": "required"}}, {"mode": "TOOL_CHOICE_MODE_REQUIRED"}),
        ({"tool_choice": NAMED}, {"mode": "TOOL_CHOICE_MODE_REQUIRED", "names": ["f"], "single_call": True}),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
            {"mode": "TOOL_CHOICE_MODE_AUTO", "names": ["f"]},
        ),
        ({"parallel_tool_calls": False}, {"single_call": True}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"mode": "TOOL_CHOICE_MODE_REQUIRED", "single_call": True},
        ),
    ],
)
def test_tool_choice(fields, expected):
    request = chat(tools=[TOOL], **fields)
    wanted = ParseDict(expected, ToolChoice()) if expected is not None else None
    assert (request.tool_choice if request.HasField("tool_choice") else None) == wanted


def test_a_model_that_must_not_call_tools_sees_none():
    assert not chat(tools=[TOOL], tool_choice="none").tools


def test_what_goes_to_the_template():
    request = chat(
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False, "n": 3},
        chat_template="{{ x }}",
        continue_final_message=True,
    )
    assert MessageToDict(request.template_arguments) == {"reasoning_effort": "low", "enable_thinking": False, "n": 3.0}
    assert (request.chat_template, request.continue_final_message) == ("{{ x }}", True)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_max_tokens(name):
    assert chat(**{name: 5}).options.max_tokens == 5


COMMON_NAMES = [
    ("options.sampling.top_p", "top_p"),
    ("options.stop[1]", "stop[1]"),
    ("options.sampling.logit_bias[3].token_id", "logit_bias"),
    ("options.sampling.bad_token_sequences[0].token_ids", "bad_words"),
    ("options.include_stop", "include_stop_str_in_output"),
    ("model", "model"),
]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *COMMON_NAMES,
        ("text", "prompt"),
        ("tokens.token_ids", "prompt"),
        ("token_ids[4]", "prompt"),
        ("prompts", "prompt"),
        ("prompts[2].tokens.token_ids", "prompt[2]"),
        ("options.max_tokens", "max_tokens"),
        ("options.sampling.num_logprobs", "logprobs"),
        ("options.sampling.num_prompt_logprobs", "echo"),
        ("options.sampling.structured_output.regex", "structured_outputs.regex"),
    ],
)
def test_names_of_a_completion(path, name):
    body = CompletionBody.model_validate({"prompt": "x", "structured_outputs": {"regex": "("}})
    assert completion_names(body).of(path) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *COMMON_NAMES,
        ("messages", "messages"),
        ("messages[0].tool_calls[1].arguments", "messages[0].tool_calls[1].function.arguments"),
        ("messages[0].reasoning", "messages[0].reasoning_content"),
        ("tools[0].parameters", "tools[0].function.parameters"),
        ("template_arguments", "chat_template_kwargs"),
        ("template_arguments.x", "chat_template_kwargs.x"),
        ("tool_choice.names[1]", "tool_choice"),
        ("options.max_tokens", "max_completion_tokens"),
        ("options.sampling.num_logprobs", "top_logprobs"),
        ("options.sampling.structured_output.json_schema", "response_format.json_schema.schema"),
    ],
)
def test_names_of_a_chat(path, name):
    body = ChatBody.model_validate(
        {
            "messages": [],
            "max_completion_tokens": 1,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        }
    )
    assert chat_names(body).of(path) == name
