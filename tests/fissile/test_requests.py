"""Python arguments to request messages."""

import json

import numpy
import pytest

from fissile import v1
from fissile.options import Options, generation_options
from fissile.requests import chat_request, generate_request


def sampling(**options):
    return generation_options(options).sampling


def generate(prompt):
    return generate_request(prompt, model="", request_id="", add_special_tokens=True, options={})


def chat(*messages, tools=(), tool_choice=None, template_arguments=None):
    return chat_request(
        messages,
        model="",
        request_id="",
        continue_final_message=False,
        tools=tools,
        tool_choice=tool_choice,
        template_arguments=template_arguments or {},
        chat_template="",
        options={},
    )


EVERY_OPTION: Options = {
    "max_tokens": 1,
    "min_tokens": 2,
    "temperature": 0.0,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 4,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {6: -1.5},
    "allowed_token_ids": [7],
    "banned_token_ids": [8],
    "bad_words": ["w"],
    "bad_token_sequences": [[9, 10]],
    "logprobs": 5,
    "prompt_logprobs": 0,
    "regex": "a+",
    "beam_width": 2,
    "length_penalty": 0.5,
    "early_stopping": True,
    "stop": "x",
    "stop_token_ids": [11],
    "stop_token_sequences": [[7, 8]],
    "include_stop": True,
    "ignore_eos": True,
    "n": 2,
    "return_text": False,
    "return_token_ids": True,
    "return_prompt_token_ids": True,
    "skip_special_tokens": False,
    "cumulative": True,
    "final_only": True,
    "heartbeat": 1.5,
    "priority": -1,
    "cache_salt": b"s",
    "routing_key": "k",
    "dp_rank": 0,
}


def test_every_option_reaches_its_field():
    options = generation_options(EVERY_OPTION)
    assert options == v1.GenerationOptions(
        max_tokens=1,
        min_tokens=2,
        sampling=v1.SamplingParams(
            temperature=0.0,
            top_k=3,
            top_p=0.5,
            min_p=0.25,
            seed=4,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias=[v1.LogitBias(token_id=6, bias=-1.5)],
            allowed_token_ids=[7],
            banned_token_ids=[8],
            bad_token_sequences=[v1.TokenSequence(token_ids=[9, 10])],
            num_logprobs=5,
            num_prompt_logprobs=0,
            structured_output=v1.StructuredOutput(regex="a+"),
            beam_search=v1.BeamSearch(width=2, length_penalty=0.5, early_stopping=True),
        ),
        stop=["x"],
        stop_token_ids=[11],
        stop_token_sequences=[v1.TokenSequence(token_ids=[7, 8])],
        include_stop=True,
        ignore_eos=True,
        n=2,
        output=v1.OutputOptions(
            text=False,
            token_ids=True,
            prompt_token_ids=True,
            cumulative=True,
            final_only=True,
            heartbeat={"seconds": 1, "nanos": 500_000_000},
        ),
        bad_words=["w"],
        skip_special_tokens=False,
        priority=-1,
        cache_salt=b"s",
        routing_key="k",
        dp_rank=0,
    )
    assert {field.name for field, _ in options.ListFields()} == set(v1.GenerationOptions.DESCRIPTOR.fields_by_name)
    assert {field.name for field, _ in options.sampling.ListFields()} == set(
        v1.SamplingParams.DESCRIPTOR.fields_by_name
    )


def test_the_test_above_has_every_option():
    constraints = {"json_schema", "json_object", "grammar", "choice"}
    assert Options.__annotations__.keys() - constraints == EVERY_OPTION.keys()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"json_schema": {"type": "object"}}, v1.StructuredOutput(json_schema='{"type": "object"}')),
        ({"json_schema": '{"type":"object"}'}, v1.StructuredOutput(json_schema='{"type":"object"}')),
        ({"json_schema": True}, v1.StructuredOutput(json_schema="true")),
        ({"json_object": True}, v1.StructuredOutput(json_object=True)),
        ({"grammar": "start: /a/"}, v1.StructuredOutput(grammar="start: /a/")),
        ({"choice": ["a", "b"]}, v1.StructuredOutput(choice=v1.Choice(choices=["a", "b"]))),
    ],
)
def test_structured_output(option, message):
    assert sampling(**option).structured_output == message


def test_what_is_not_given_stays_unset():
    options = generation_options({"temperature": None, "json_schema": None, "beam_width": None})
    assert not options.HasField("max_tokens") and not options.sampling.ListFields()
    assert not options.output.ListFields()


def test_zero_is_not_unset():
    assert sampling(temperature=0.0).HasField("temperature")
    assert sampling(logprobs=0).HasField("num_logprobs")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_token": 1}, "unknown option: max_token"),
        ({"regex": "a", "choice": ["b"]}, "only one of json_schema, json_object, regex, grammar, choice"),
        ({"length_penalty": 1.0}, "need beam_width"),
        ({"temperature": "hot"}, "must be real number"),
    ],
)
def test_what_makes_no_sense_is_a_type_error(options, words):
    with pytest.raises(TypeError, match=words):
        generation_options(options)


def test_prompts():
    assert generate("a").text == "a"
    assert list(generate([1, 2]).tokens.token_ids) == [1, 2]
    assert list(generate(numpy.array([1, 2])).tokens.token_ids) == [1, 2]
    several = generate(["a", [1, 2]])
    assert several.prompts[0].text == "a"
    assert list(several.prompts[1].tokens.token_ids) == [1, 2]
    assert several.WhichOneof("prompt") is None
    assert generate([]).WhichOneof("prompt") == "tokens"


def test_messages_with_everything():
    call = {"id": "1", "name": "f", "arguments": {"x": 1}}
    assistant = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning": "r"}
    tool = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"}
    request = chat(assistant, tool)
    assert list(request.messages) == [
        v1.ChatMessage(
            role=v1.CHAT_ROLE_ASSISTANT,
            reasoning="r",
            tool_calls=[v1.ToolCall(id="1", name="f", arguments='{"x": 1}')],
        ),
        v1.ChatMessage(role=v1.CHAT_ROLE_TOOL, content="2", tool_call_id="1", name="f"),
    ]


def test_tools_and_template_arguments():
    parameters = {"type": "object"}
    request = chat(
        {"role": "user", "content": "?"},
        tools=[{"name": "f", "description": "d", "parameters": parameters}, {"name": "g"}],
        template_arguments={"enable_thinking": False, "depth": {"a": [1]}},
    )
    assert list(request.tools) == [
        v1.Tool(name="f", description="d", parameters=json.dumps(parameters)),
        v1.Tool(name="g"),
    ]
    assert request.template_arguments["enable_thinking"] is False
    assert request.template_arguments["depth"]["a"][0] == 1


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ({"mode": "required"}, v1.ToolChoice(mode=v1.TOOL_CHOICE_MODE_REQUIRED)),
        (
            {"names": ["f"], "single_call": True},
            v1.ToolChoice(mode=v1.TOOL_CHOICE_MODE_AUTO, names=["f"], single_call=True),
        ),
    ],
)
def test_tool_choice(choice, expected):
    request = chat({"role": "user", "content": "?"}, tools=[{"name": "f"}], tool_choice=choice)
    assert (request.tool_choice if request.HasField("tool_choice") else None) == expected


def test_an_unknown_tool_choice_is_a_value_error():
    with pytest.raises(ValueError, match="tool_choice 'must': not one of auto, none, required"):
        chat(tool_choice={"mode": "must"})


def test_an_unknown_role_is_a_value_error():
    with pytest.raises(ValueError, match="role 'robot'"):
        chat({"role": "robot", "content": ""})
