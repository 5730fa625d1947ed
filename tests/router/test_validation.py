"""Each rule on each field: exact words, and all violations at once."""

import pytest
from google.protobuf.duration_pb2 import Duration

from common.errors import InvalidArgumentError, UnimplementedError
from fissile.v1 import (
    BeamSearch,
    ChatMessage,
    ChatRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerationOptions,
    LogitBias,
    OutputOptions,
    Prompt,
    SamplingParams,
    StructuredOutput,
    TokenizeRequest,
    TokenSequence,
)
from router.validation import RULES, Limits, check_length, refuse_unsupported, validate

LIMITS = Limits(vocab_size=100, max_model_len=16, max_prompt_bytes=20)
NAN = float("nan")


def faults(request):
    try:
        validate(request, RULES[type(request)], LIMITS)
    except InvalidArgumentError as error:
        return {v.field: v.description for v in error.violations}
    return {}


def ask(text="hi", sampling=None, **options):
    return GenerateRequest(text=text, options=GenerationOptions(sampling=sampling, **options))


def sampled(**values):
    return ask(sampling=SamplingParams(**values))


@pytest.mark.parametrize(
    ("request_", "field", "text"),
    [
        (GenerateRequest(), "text", "a prompt is needed: text or tokens"),
        (ask(text=""), "text", "must not be empty"),
        (ask(text="é" * 11), "text", "must have at most 20 bytes, has 22"),
        (GenerateRequest(tokens=TokenSequence()), "tokens.token_ids", "must not be empty"),
        (
            GenerateRequest(tokens=TokenSequence(token_ids=[99, 100])),
            "tokens.token_ids",
            "entry 1 must be below the vocabulary size 100, is 100",
        ),
        (ask(max_tokens=0), "options.max_tokens", "must be at least 1, is 0"),
        (sampled(temperature=-0.5), "options.sampling.temperature", "must be 0 ≤ value ≤ 100, is -0.5"),
        (sampled(temperature=NAN), "options.sampling.temperature", "must be 0 ≤ value ≤ 100, is nan"),
        (sampled(top_p=2), "options.sampling.top_p", "must be 0 < value ≤ 1, is 2"),
        (sampled(top_p=0), "options.sampling.top_p", "must be 0 < value ≤ 1, is 0"),
        (sampled(top_k=-2), "options.sampling.top_k", "must be at least -1, is -2"),
        (sampled(min_p=1.5), "options.sampling.min_p", "must be 0 ≤ value ≤ 1, is 1.5"),
        (sampled(beam_search=BeamSearch()), "options.sampling.beam_search.width", "must be 2 ≤ value ≤ 16, is 0"),
        (ask(n=0), "options.n", "must be 1 ≤ value ≤ 128, is 0"),
        (ask(n=129), "options.n", "must be 1 ≤ value ≤ 128, is 129"),
        (ask(stop=["a"] * 17), "options.stop", "must have at most 16 entries, has 17"),
        (ask(stop=["a", ""]), "options.stop", "entry 1 must have 1 to 1024 characters, has 0"),
        (
            ask(stop_token_ids=[100]),
            "options.stop_token_ids",
            "entry 0 must be below the vocabulary size 100, is 100",
        ),
        (
            ask(stop_token_sequences=[TokenSequence(token_ids=[1]), TokenSequence()]),
            "options.stop_token_sequences",
            "sequence 1: must not be empty",
        ),
        (ask(cache_salt=b"x" * 257), "options.cache_salt", "must have at most 256 bytes, has 257"),
        (ask(min_tokens=3, max_tokens=2), "options.min_tokens", "must not exceed max_tokens 2, is 3"),
        (
            ask(output=OutputOptions(heartbeat=Duration())),
            "options.output.heartbeat",
            "must be at least 0.01 s, is 0 s",
        ),
        (GenerateRequest(text="a", request_id="x" * 129), "request_id", "must have at most 128 characters, has 129"),
        (GenerateRequest(text="a", request_id="a\nb"), "request_id", "must be printable ASCII"),
        (ChatRequest(), "messages", "must not be empty"),
        (ChatRequest(messages=[ChatMessage(content="a")]), "messages", "message 0 needs a role, has 0"),
        (
            ChatRequest(messages=[ChatMessage(role=2, content="a" * 21)]),
            "messages",
            "must have at most 20 bytes, has 21",
        ),
        (TokenizeRequest(text="a" * 21), "text", "must have at most 20 bytes, has 21"),
        (DetokenizeRequest(token_ids=[100]), "token_ids", "entry 0 must be below the vocabulary size 100, is 100"),
    ],
)
def test_a_bad_field_is_named_with_value_and_limit(request_, field, text):
    assert faults(request_) == {field: text}


def test_beam_search_with_too_many_completions_or_stops():
    request = ask(sampling=SamplingParams(beam_search=BeamSearch(width=2)), n=3, stop=["a"])
    assert faults(request) == {
        "options.n": "must not exceed the beam width 2, is 3",
        "options.stop": "beam search has no stop strings; use stop_token_ids",
    }


def test_all_violations_come_together():
    request = ask(text="", sampling=SamplingParams(top_p=2, temperature=-1), max_tokens=0)
    with pytest.raises(InvalidArgumentError) as caught:
        validate(request, RULES[GenerateRequest], LIMITS)
    assert [v.field for v in caught.value.violations] == [
        "text",
        "options.sampling.temperature",
        "options.sampling.top_p",
        "options.max_tokens",
    ]
    assert "options.sampling.top_p: must be 0 < value ≤ 1, is 2" in caught.value.message


@pytest.mark.parametrize(
    "request_",
    [
        ask(),
        sampled(temperature=0, top_k=0, top_p=1, min_p=0, seed=2**64 - 1),
        sampled(top_k=-1, temperature=100),
        sampled(top_k=10**7),
        ask(n=128, max_tokens=1, stop=["x" * 1024], stop_token_ids=[99], min_tokens=1),
        GenerateRequest(tokens=TokenSequence(token_ids=[0, 99])),
        TokenizeRequest(),
        DetokenizeRequest(),
    ],
)
def test_borders_are_allowed(request_):
    assert faults(request_) == {}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (sampled(presence_penalty=0.5), "options.sampling.presence_penalty"),
        (sampled(frequency_penalty=0.0), "options.sampling.frequency_penalty"),
        (sampled(repetition_penalty=1.1), "options.sampling.repetition_penalty"),
        (sampled(logit_bias=[LogitBias(token_id=1, bias=1)]), "options.sampling.logit_bias"),
        (sampled(allowed_token_ids=[1]), "options.sampling.allowed_token_ids"),
        (sampled(banned_token_ids=[1]), "options.sampling.banned_token_ids"),
        (sampled(bad_token_sequences=[TokenSequence(token_ids=[1])]), "options.sampling.bad_token_sequences"),
        (sampled(structured_output=StructuredOutput(regex="a")), "options.sampling.structured_output"),
        (ask(bad_words=["x"]), "options.bad_words"),
        (ask(routing_key="x"), "options.routing_key"),
        (GenerateRequest(prompts=[Prompt(text="a")]), "prompts"),
    ],
)
def test_what_is_not_served_yet_is_refused_by_name(request_, field):
    with pytest.raises(UnimplementedError) as caught:
        refuse_unsupported(request_)
    assert [v.field for v in caught.value.violations] == [field]
    assert field in caught.value.message


def test_a_prompt_must_leave_room_for_a_token():
    check_length("text", 15, LIMITS)
    with pytest.raises(InvalidArgumentError, match=r"16 tokens.*context of 16 leaves at most 15"):
        check_length("text", 16, LIMITS)
    with pytest.raises(InvalidArgumentError, match="has no tokens"):
        check_length("text", 0, LIMITS)
