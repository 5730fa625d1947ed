"""Python arguments to request messages."""

import json

import numpy
import pytest

from fissile import v1
from fissile.arguments import MAX_SECONDS, seconds
from fissile.errors import InvalidArgumentError
from fissile.options import Options, generation_options
from fissile.requests import chat_request, detokenize_request, generate_request, stats_request, tokenize_request


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


USER = {"role": "user", "content": "?"}
CALL = {"id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": "hot"}, "temperature: 'hot' is not a number"),
        ({"max_tokens": -1}, "max_tokens: -1 is not an integer from 0 to 4294967295"),
        ({"n": 1.5}, "n: 1.5 is not an integer from 0 to"),
        ({"seed": 2**64}, "seed: 18446744073709551616 is not an integer from 0 to 18446744073709551615"),
        ({"logprobs": -1}, "logprobs: -1 is not an integer"),
        ({"beam_width": "x"}, "beam_width: 'x' is not an integer"),
        ({"ignore_eos": "no"}, "ignore_eos: 'no' is not True or False"),
        ({"return_token_ids": "no"}, "return_token_ids: 'no' is not True or False"),
        ({"cache_salt": "x"}, "cache_salt: 'x' is not bytes"),
        ({"routing_key": "\ud800"}, "routing_key: '\\ud800' is not a text of Unicode characters"),
        ({"stop": [5]}, "stop[0]: 5 is not a text"),
        ({"stop_token_ids": 5}, "stop_token_ids: 5 is not a list"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]: -1 is not an integer"),
        ({"stop_token_sequences": [[1], [2**32]]}, "stop_token_sequences[1][0]: 4294967296 is not an integer"),
        ({"bad_token_sequences": [1]}, "bad_token_sequences[0]: 1 is not a list"),
        ({"bad_words": "abc"}, "bad_words: 'abc' is not a list"),
        ({"choice": "abc"}, "choice: 'abc' is not a list"),
        ({"choice": ["a", 1]}, "choice[1]: 1 is not a text"),
        ({"regex": 5}, "regex: 5 is not a text"),
        ({"json_schema": {1, 2}}, "json_schema: cannot be written as JSON: "),
        ({"logit_bias": [1]}, "logit_bias: [1] is not a mapping"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias[-5]: -5 is not an integer"),
        ({"logit_bias": {5: "x"}}, "logit_bias[5]: 'x' is not a number"),
        ({"heartbeat": float("nan")}, "heartbeat: nan is not a number of seconds"),
        ({"routing_key": b"\xff" * 100}, "\\xff\\x… is not a text"),
    ],
)
def test_an_option_that_its_field_cannot_hold_is_named(options, said):
    with pytest.raises(InvalidArgumentError) as raised:
        generation_options(options)
    assert said in raised.value.message
    assert [violation.field for violation in raised.value.violations] == [raised.value.message.partition(": ")[0]]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "prompt: None is not a list"),
        (b"hi", "prompt: b'hi' is not a list"),
        ({"a": 1}, "prompt: {'a': 1} is not a list"),
        ("\ud800", "prompt: '\\ud800' is not a text"),
        ([1, -1], "prompt[1]: -1 is not an integer"),
        ([1.5], "prompt[0]: 1.5 is not a text or a list of token ids"),
        (["a", 5], "prompt[1]: 5 is not a text or a list of token ids"),
        ([[1], ["a"]], "prompt[1][0]: 'a' is not an integer"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt, said):
    with pytest.raises(InvalidArgumentError) as raised:
        generate(prompt)
    assert raised.value.message.startswith(said)


def test_a_prompt_may_be_any_iterable_of_ids():
    assert list(generate(iter([1, 2])).tokens.token_ids) == [1, 2]


@pytest.mark.parametrize(
    ("messages", "others", "said"),
    [
        (["hi"], {}, "messages[0]: 'hi' is not a mapping"),
        ([USER, {"content": ""}], {}, "messages[1].role: is missing"),
        ([{"role": "robot", "content": ""}], {}, "messages[0].role: 'robot' is not one of system, developer, user"),
        ([{"role": "user", "content": [{"text": "a"}]}], {}, "messages[0].content: [{'text': 'a'}] is not a text"),
        ([USER | {"within": 1}], {}, "messages[0].within: there is no such thing; known are role, content, name, "),
        ([USER | {"tool_calls": [CALL, {}]}], {}, "messages[0].tool_calls[1].arguments: is missing"),
        ([USER | {"tool_calls": [CALL | {"id": 1}]}], {}, "messages[0].tool_calls[0].id: 1 is not a text"),
        ([USER], {"tools": [{}]}, "tools[0].name: is missing"),
        ([USER], {"tools": "f"}, "tools: 'f' is not a list"),
        ([USER], {"tool_choice": "auto"}, "tool_choice: 'auto' is not a mapping"),
        ([USER], {"tool_choice": {"mode": "must"}}, "tool_choice.mode: 'must' is not one of auto, none, required"),
        ([USER], {"tool_choice": {"names": "f"}}, "tool_choice.names: 'f' is not a list"),
        ([USER], {"template_arguments": {"a": object()}}, "template_arguments: names must be texts, and values"),
    ],
)
def test_a_conversation_that_no_message_can_hold_is_refused_by_its_place(messages, others, said):
    with pytest.raises(InvalidArgumentError) as raised:
        chat(*messages, **others)
    assert raised.value.message.startswith(said)


def test_other_requests_name_their_arguments():
    for make, said in (
        (lambda: tokenize_request(5, model="", add_special_tokens=True), "text: 5 is not a text"),
        (lambda: detokenize_request([-1], model="", skip_special_tokens=True), "token_ids[0]: -1 is not an integer"),
        (lambda: stats_request(-1), "window: -1 is not an integer"),
    ):
        with pytest.raises(InvalidArgumentError) as raised:
            make()
        assert raised.value.message.startswith(said)


def test_seconds_are_numbers_that_grpc_can_count():
    assert seconds("timeout", 5) == 5.0 and seconds("timeout", float("inf")) == seconds("timeout", 1e30) == MAX_SECONDS
    for value in (float("nan"), "5", True):
        with pytest.raises(InvalidArgumentError, match=r"^timeout: .* is not a number of seconds$"):
            seconds("timeout", value)
