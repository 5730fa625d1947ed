"""Each rule on each field: what is refused, in exact words, and what is just allowed; all violations at once."""

import json

import pytest

from fissile.errors import InvalidArgumentError
from fissile.v1 import (
    BeamSearch,
    ChatMessage,
    ChatRequest,
    CompositeGrammar,
    DetokenizeRequest,
    GenerateRequest,
    GenerationOptions,
    OutputOptions,
    Prompt,
    SamplingParams,
    TokenizeRequest,
    TokenSequence,
    Tool,
    ToolChoice,
)
from router.asking.checks import Limits
from router.asking.validation import validate
from tests.router.asking.requests import (
    BEYOND,
    HELD,
    INF,
    MIB,
    NAN,
    SAMPLING,
    USER,
    ask,
    between,
    biased,
    called,
    chat,
    choices,
    choosing,
    faults,
    heartbeat,
    sampled,
    sequences,
    structured,
    tools,
    variables,
)

BAD_NUMBERS = {
    "temperature": between(0, 100, -0.5, 101, NAN, INF, -INF),
    "top_k": [(-2, "must be at least -1, is -2")],
    "top_p": between(0, 1, 0, 1.5, -1, NAN, INF, sign="<"),
    "min_p": between(0, 1, -0.5, 1.5, NAN, INF),
    "presence_penalty": between(-2, 2, -2.5, 2.5, NAN, INF, -INF),
    "frequency_penalty": between(-2, 2, -2.5, 2.5, NAN, INF, -INF),
    "repetition_penalty": between(0, 2, 0, 2.5, -1, NAN, INF, sign="<"),
    "num_logprobs": between(0, 64, 65, 2**32 - 1),
    "num_prompt_logprobs": between(0, 64, 65),
}


@pytest.mark.parametrize(
    ("name", "value", "words"), [(name, value, words) for name, bad in BAD_NUMBERS.items() for value, words in bad]
)
def test_a_number_out_of_its_range(name, value, words):
    assert faults(sampled(**{name: value})) == {f"{SAMPLING}.{name}": words}


BAD = [
    # The prompt.
    (GenerateRequest(), "text", "a prompt is needed: text, tokens or prompts"),
    (ask(text=""), "text", "must not be empty"),
    (ask(text="é" * 31), "text", "must have at most 60 bytes, has 62"),
    (GenerateRequest(tokens=TokenSequence()), "tokens.token_ids", "must not be empty"),
    (GenerateRequest(tokens=TokenSequence(token_ids=[99, 100])), "tokens.token_ids[1]", BEYOND),
    (GenerateRequest(prompts=[Prompt()] * 257), "prompts", "must have at most 256 entries, has 257"),
    (
        GenerateRequest(prompts=[Prompt(text="x" * 30)] * 2),
        "prompts",
        "must have at most 60 bytes encoded, has 64",
    ),
    (GenerateRequest(prompts=[Prompt(text="a"), Prompt()]), "prompts[1].text", "a prompt is needed: text or tokens"),
    (GenerateRequest(prompts=[Prompt(text="")]), "prompts[0].text", "must not be empty"),
    (GenerateRequest(prompts=[Prompt(tokens=TokenSequence())]), "prompts[0].tokens.token_ids", "must not be empty"),
    (
        GenerateRequest(prompts=[Prompt(tokens=TokenSequence(token_ids=[100]))]),
        "prompts[0].tokens.token_ids[0]",
        BEYOND,
    ),
    (GenerateRequest(text="a", prompts=[Prompt(text="b")]), "prompts", "must be empty when text or tokens is set"),
    (
        GenerateRequest(
            prompts=[Prompt(text="b")] * 2, options=GenerationOptions(output=OutputOptions(prompt_token_ids=True))
        ),
        "options.output.prompt_token_ids",
        "must be false with several prompts",
    ),
    (
        GenerateRequest(
            prompts=[Prompt(text="b")] * 2, options=GenerationOptions(sampling=SamplingParams(num_prompt_logprobs=0))
        ),
        "options.sampling.num_prompt_logprobs",
        "must be unset with several prompts",
    ),
    (GenerateRequest(text="a", request_id="x" * 129), "request_id", "must have at most 128 characters, has 129"),
    (GenerateRequest(text="a", request_id="a\nb"), "request_id", "must be printable ASCII, is 'a\\nb'"),
    # Which tokens may come.
    (biased((1, 0), (100, 0)), f"{SAMPLING}.logit_bias[1].token_id", BEYOND),
    (biased((1, 101)), f"{SAMPLING}.logit_bias[0].bias", "must be -100 ≤ value ≤ 100, is 101"),
    (biased((1, NAN)), f"{SAMPLING}.logit_bias[0].bias", "must be -100 ≤ value ≤ 100, is nan"),
    (biased((1, -INF)), f"{SAMPLING}.logit_bias[0].bias", "must be -100 ≤ value ≤ 100, is -inf"),
    (biased((1, 0), (2, 0), (1, 1)), f"{SAMPLING}.logit_bias[2].token_id", "must differ from entry 0, is 1 too"),
    (biased(*[(0, 0)] * 1025), f"{SAMPLING}.logit_bias", "must have at most 1024 entries, has 1025"),
    (sampled(allowed_token_ids=[0, 100]), f"{SAMPLING}.allowed_token_ids[1]", BEYOND),
    (sampled(allowed_token_ids=[0] * 101), f"{SAMPLING}.allowed_token_ids", "must have at most 100 entries, has 101"),
    (sampled(banned_token_ids=[100]), f"{SAMPLING}.banned_token_ids[0]", BEYOND),
    (sampled(banned_token_ids=[0] * 101), f"{SAMPLING}.banned_token_ids", "must have at most 100 entries, has 101"),
    (
        sampled(allowed_token_ids=[1, 2, 3], banned_token_ids=[1, 2], bad_token_sequences=sequences([3])),
        f"{SAMPLING}.allowed_token_ids",
        "all of them are banned",
    ),
    (sampled(banned_token_ids=range(100)), f"{SAMPLING}.banned_token_ids", "all 100 tokens are banned"),
    (
        sampled(bad_token_sequences=sequences([1], [])),
        f"{SAMPLING}.bad_token_sequences[1].token_ids",
        "must not be empty",
    ),
    (sampled(bad_token_sequences=sequences([1, 100])), f"{SAMPLING}.bad_token_sequences[0].token_ids[1]", BEYOND),
    (
        sampled(bad_token_sequences=sequences([1] * 33)),
        f"{SAMPLING}.bad_token_sequences[0].token_ids",
        "must have at most 32 entries, has 33",
    ),
    (
        sampled(bad_token_sequences=sequences(*[[1, 2]] * 257)),
        f"{SAMPLING}.bad_token_sequences",
        "must have at most 256 entries, has 257",
    ),
    (ask(bad_words=["a", ""]), "options.bad_words[1]", "must have 1 to 1024 characters, has 0"),
    (ask(bad_words=["a" * 1025]), "options.bad_words[0]", "must have 1 to 1024 characters, has 1025"),
    (ask(bad_words=["a"] * 65), "options.bad_words", "must have at most 64 entries, has 65"),
    # Beam search and grammars.
    (sampled(beam_search=BeamSearch()), f"{SAMPLING}.beam_search.width", "must be 2 ≤ value ≤ 16, is 0"),
    (sampled(beam_search=BeamSearch(width=17)), f"{SAMPLING}.beam_search.width", "must be 2 ≤ value ≤ 16, is 17"),
    (
        sampled(beam_search=BeamSearch(width=2, length_penalty=NAN)),
        f"{SAMPLING}.beam_search.length_penalty",
        "must be finite, is nan",
    ),
    (
        structured()(),
        f"{SAMPLING}.structured_output",
        "needs one of json_schema, json_object, regex, grammar, choice",
    ),
    (structured()(json_object=False), f"{SAMPLING}.structured_output.json_object", "must be true when set, is false"),
    (
        structured()(composite=CompositeGrammar(grammar="start: A")),
        f"{SAMPLING}.structured_output.composite",
        "is set by the router; clients cannot",
    ),
    (structured()(regex=""), f"{SAMPLING}.structured_output.regex", "must not be empty"),
    (structured()(grammar=""), f"{SAMPLING}.structured_output.grammar", "must not be empty"),
    (
        structured()(regex="a" * (MIB + 1)),
        f"{SAMPLING}.structured_output.regex",
        "must have at most 1048576 bytes, has 1048577",
    ),
    (choices(), f"{SAMPLING}.structured_output.choice.choices", "must not be empty"),
    (choices("a", ""), f"{SAMPLING}.structured_output.choice.choices[1]", "must not be empty"),
    (
        choices(*["a"] * 1025),
        f"{SAMPLING}.structured_output.choice.choices",
        "must have at most 1024 entries, has 1025",
    ),
    (
        choices("a" * MIB, "b"),
        f"{SAMPLING}.structured_output.choice.choices",
        "must have at most 1048576 bytes together, has 1048577",
    ),
    (structured()(json_schema=""), f"{SAMPLING}.structured_output.json_schema", "must not be empty"),
    (
        structured()(json_schema="[1]"),
        f"{SAMPLING}.structured_output.json_schema",
        "must be a JSON object or boolean, is an array",
    ),
    (
        structured()(json_schema="{"),
        f"{SAMPLING}.structured_output.json_schema",
        "must be a JSON object or boolean: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    (
        structured()(json_schema='{"maximum": NaN}'),
        f"{SAMPLING}.structured_output.json_schema",
        "must be a JSON object or boolean: NaN is no JSON",
    ),
    (
        structured()(json_schema='{"const": "\\ud800"}'),
        f"{SAMPLING}.structured_output.json_schema",
        "must be a JSON object or boolean; it has half a surrogate pair",
    ),
    (
        structured()(json_schema="[" * 100_000),
        f"{SAMPLING}.structured_output.json_schema",
        "must be a JSON object or boolean; it is nested too deeply",
    ),
    (structured(ignore_eos=True)(regex="a"), "options.ignore_eos", "must be false with structured_output"),
    (structured(min_tokens=1)(regex="a"), "options.min_tokens", "must be 0 with structured_output, is 1"),
    # Where it ends, and what is sent.
    (ask(max_tokens=0), "options.max_tokens", "must be at least 1, is 0"),
    (ask(min_tokens=3, max_tokens=2), "options.min_tokens", "must not exceed max_tokens 2, is 3"),
    (ask(stop=["a"] * 17), "options.stop", "must have at most 16 entries, has 17"),
    (ask(stop=["a", ""]), "options.stop[1]", "must have 1 to 1024 characters, has 0"),
    (ask(stop=["a" * 1025]), "options.stop[0]", "must have 1 to 1024 characters, has 1025"),
    (ask(stop_token_ids=[1, 100]), "options.stop_token_ids[1]", BEYOND),
    (ask(stop_token_ids=[1] * 1025), "options.stop_token_ids", "must have at most 1024 entries, has 1025"),
    (
        ask(stop_token_sequences=sequences(*[[1]] * 65)),
        "options.stop_token_sequences",
        "must have at most 64 entries, has 65",
    ),
    (ask(stop_token_sequences=sequences([1], [])), "options.stop_token_sequences[1].token_ids", "must not be empty"),
    (
        ask(stop_token_sequences=sequences([1] * 257)),
        "options.stop_token_sequences[0].token_ids",
        "must have at most 256 entries, has 257",
    ),
    (ask(stop_token_sequences=sequences([100])), "options.stop_token_sequences[0].token_ids[0]", BEYOND),
    (ask(n=0), "options.n", "must be 1 ≤ value ≤ 128, is 0"),
    (ask(n=129), "options.n", "must be 1 ≤ value ≤ 128, is 129"),
    (ask(cache_salt=b"x" * 257), "options.cache_salt", "must have at most 256 bytes, has 257"),
    (ask(routing_key="é" * 129), "options.routing_key", "must have at most 256 bytes, has 258"),
    (ask(dp_rank=2), "options.dp_rank", "must be below 2, is 2"),
    (heartbeat(0), "options.output.heartbeat", "must be at least 0.01 s, is 0 s"),
    (heartbeat(-1000), "options.output.heartbeat", "must be at least 0.01 s, is -1 s"),
    # Conversations.
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
    # The small calls.
    (TokenizeRequest(text="a" * 61), "text", "must have at most 60 bytes, has 61"),
    (DetokenizeRequest(token_ids=[100]), "token_ids[0]", BEYOND),
]


@pytest.mark.parametrize(
    ("request_", "field", "words"), BAD, ids=[f"{i}-{field}" for i, (_, field, _) in enumerate(BAD)]
)
def test_a_bad_field_is_named_with_value_and_limit(request_, field, words):
    assert faults(request_)[field] == words


GOOD = [
    ask(),
    ask(text="é" * 30),
    GenerateRequest(tokens=TokenSequence(token_ids=[0, 99])),
    GenerateRequest(prompts=[Prompt(text="a"), Prompt(tokens=TokenSequence(token_ids=[99]))]),
    GenerateRequest(
        prompts=[Prompt(text="a")],
        options=GenerationOptions(
            output=OutputOptions(prompt_token_ids=True), sampling=SamplingParams(num_prompt_logprobs=0)
        ),
    ),
    GenerateRequest(text="a", request_id="x" * 128),
    sampled(temperature=0, top_k=0, top_p=1, min_p=0, seed=2**64 - 1),
    sampled(temperature=100, top_k=-1, min_p=1),
    sampled(temperature=1e-12, top_k=10**7, top_p=1e-6),
    sampled(presence_penalty=-2, frequency_penalty=-2, repetition_penalty=1e-3),
    sampled(presence_penalty=2, frequency_penalty=2, repetition_penalty=2),
    biased((0, -100), (99, 100)),
    sampled(allowed_token_ids=range(100)),
    sampled(allowed_token_ids=[1, 2], banned_token_ids=[2, *range(3, 100)]),
    sampled(bad_token_sequences=sequences(*[[1] * 32] * 256)),
    ask(bad_words=["a" * 1024] * 64),
    sampled(num_logprobs=0, num_prompt_logprobs=64),
    sampled(num_logprobs=64, num_prompt_logprobs=0),
    sampled(beam_search=BeamSearch(width=2, length_penalty=-3)),
    sampled(beam_search=BeamSearch(width=16), presence_penalty=0, frequency_penalty=0, repetition_penalty=1),
    ask(n=16, sampling=SamplingParams(beam_search=BeamSearch(width=16)), stop_token_ids=[1]),
    structured()(json_schema="{}"),
    structured()(json_schema="true"),
    structured()(json_schema=json.dumps({"const": "😀"})),
    structured()(json_object=True),
    structured(stop=["x"])(regex="a" * MIB),
    structured(n=128)(grammar="start: /a/"),
    choices(*["a"] * 1024),
    choices("a" * MIB),
    ask(n=128, max_tokens=1, stop=["x" * 1024] * 16, stop_token_ids=[99] * 1024, min_tokens=1),
    ask(n=1, max_tokens=2**32 - 1, stop_token_sequences=sequences(*[[99] * 256] * 64)),
    ask(cache_salt=b"x" * 256, routing_key="é" * 128, dp_rank=1, priority=-(2**31)),
    heartbeat(10),
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
    TokenizeRequest(),
    DetokenizeRequest(token_ids=[99]),
    DetokenizeRequest(),
]


@pytest.mark.parametrize("request_", GOOD, ids=range(len(GOOD)))
def test_borders_are_allowed(request_):
    assert faults(request_) == {}


def test_the_longest_tool_name_has_64_characters():
    roomy = Limits(vocab_size=100, max_model_len=16, max_prompt_bytes=1000)
    validate(tools("a" * 64), roomy)
    with pytest.raises(InvalidArgumentError, match=r"tools\[0\].name"):
        validate(tools("a" * 65), roomy)
