"""Which tokens may come, beam search, grammars: what is refused, in exact words, and what is just allowed."""

import json

import pytest

from fissile.v1 import BeamSearch, CompositeGrammar, SamplingParams
from tests.router.asking.requests import (
    BEYOND,
    INF,
    MIB,
    NAN,
    SAMPLING,
    ask,
    bad_fields,
    between,
    biased,
    borders,
    choices,
    faults,
    sampled,
    sequences,
    structured,
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
]


@bad_fields(BAD)
def test_a_bad_field_is_named_with_value_and_limit(request_, field, words):
    assert faults(request_)[field] == words


GOOD = [
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
]


@borders(GOOD)
def test_borders_are_allowed(request_):
    assert faults(request_) == {}
