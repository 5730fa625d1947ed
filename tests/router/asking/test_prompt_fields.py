"""Prompts of each kind of request, and what names one: what is refused, in exact words, and what is just allowed."""

from fissile.v1 import (
    DetokenizeRequest,
    GenerateRequest,
    GenerationOptions,
    OutputOptions,
    Prompt,
    SamplingParams,
    TokenizeRequest,
    TokenSequence,
)
from tests.router.asking.requests import BEYOND, ask, bad_fields, borders, faults

BAD = [
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
    (TokenizeRequest(text="a" * 61), "text", "must have at most 60 bytes, has 61"),
    (DetokenizeRequest(token_ids=[100]), "token_ids[0]", BEYOND),
]


@bad_fields(BAD)
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
    TokenizeRequest(),
    DetokenizeRequest(token_ids=[99]),
    DetokenizeRequest(),
]


@borders(GOOD)
def test_borders_are_allowed(request_):
    assert faults(request_) == {}
