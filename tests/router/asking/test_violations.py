"""Violations together: all that are found are named, up to a number, and the search for them is bounded."""

from dataclasses import replace

import pytest
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from fissile.errors import MAX_VIOLATIONS, FieldViolation, InvalidArgumentError
from fissile.v1 import (
    BeamSearch,
    ChatMessage,
    ChatRequest,
    GenerateRequest,
    GenerationOptions,
    LogitBias,
    Prompt,
    SamplingParams,
    StructuredOutput,
    TokenSequence,
    Tool,
    ToolCall,
)
from router.asking import validation
from router.asking.rules_together import broken_together
from router.asking.validation import check_counts, check_length, held_bytes, validate
from tests.router.asking.requests import LIMITS, MIB, ask, biased, chat, sequences


def test_beam_search_names_all_that_cannot_go_with_it():
    sampling = SamplingParams(
        beam_search=BeamSearch(width=2),
        presence_penalty=1,
        frequency_penalty=1,
        repetition_penalty=1.5,
        logit_bias=[LogitBias()],
        allowed_token_ids=[1],
        banned_token_ids=[2],
        bad_token_sequences=sequences([3]),
        num_logprobs=0,
        num_prompt_logprobs=0,
        structured_output=StructuredOutput(regex="a"),
    )
    words = "cannot go with beam search"
    request = ask(sampling=sampling, n=3, stop=["a"], bad_words=["b"])
    assert {v.field: v.description for v in broken_together(request, LIMITS)} == {
        "options.n": "must not exceed the beam width 2, is 3",
        "options.stop": "beam search has no stop strings; use stop_token_ids",
        "options.sampling.presence_penalty": words,
        "options.sampling.frequency_penalty": words,
        "options.sampling.repetition_penalty": words,
        "options.sampling.logit_bias": words,
        "options.sampling.allowed_token_ids": words,
        "options.sampling.banned_token_ids": words,
        "options.sampling.bad_token_sequences": words,
        "options.sampling.num_logprobs": words,
        "options.sampling.num_prompt_logprobs": words,
        "options.sampling.structured_output": words,
        "options.bad_words": words,
    }


def test_all_violations_come_together():
    request = ask(text="", sampling=SamplingParams(top_p=2, temperature=-1), max_tokens=0)
    with pytest.raises(InvalidArgumentError) as caught:
        validate(request, LIMITS)
    assert {v.field for v in caught.value.violations} == {
        "text",
        "options.sampling.temperature",
        "options.sampling.top_p",
        "options.max_tokens",
    }
    assert "options.sampling.top_p: must be 0 < value ≤ 1, is 2" in caught.value.message


def test_of_very_many_violations_the_first_are_named():
    """They travel in a header."""
    with pytest.raises(InvalidArgumentError) as caught:
        validate(biased(*[(i + 100, 0) for i in range(1000)]), LIMITS)
    assert len(caught.value.violations) == MAX_VIOLATIONS
    assert caught.value.message.endswith("; and more")


MANY = 100_000


@pytest.mark.parametrize(
    ("request_", "field", "said"),
    [
        (ChatRequest(messages=[ChatMessage()] * MANY), "messages", "at most 16384 entries, has 100000"),
        (
            ChatRequest(messages=[ChatMessage(role=2, tool_calls=[ToolCall()] * MANY)]),
            "messages",
            "at most 16384 tool calls together, has 100000",
        ),
        (ChatRequest(messages=[ChatMessage(role=2)], tools=[Tool()] * MANY), "tools", "1024"),
        (GenerateRequest(prompts=[Prompt()] * MANY), "prompts", "256"),
        (GenerateRequest(tokens=TokenSequence(token_ids=[LIMITS.vocab_size] * MANY)), "tokens.token_ids", "leaves at"),
    ],
)
def test_the_entries_of_a_list_that_is_too_long_are_not_looked_at(monkeypatch, request_, field, said):
    """Counted first: nothing is said of the entries, which are at fault, too."""
    monkeypatch.setattr(validation, "broken_together", lambda request, limits: ())
    with pytest.raises(InvalidArgumentError) as caught:
        validate(request_, replace(LIMITS, max_prompt_bytes=MIB))
    (violation,) = caught.value.violations
    assert violation.field == field and said in violation.description


def test_the_search_for_faults_ends_with_the_first_few():
    looked_at = []

    def faults():
        for i in range(MANY):
            looked_at.append(i)
            yield FieldViolation(f"f[{i}]", "is wrong")

    with pytest.raises(InvalidArgumentError) as caught:
        validation.refuse(faults())
    assert len(looked_at) == MAX_VIOLATIONS + 1
    assert [v.field for v in caught.value.violations] == [f"f[{i}]" for i in range(MAX_VIOLATIONS)]


def test_a_prompt_must_leave_room_for_a_token():
    check_length("text", 15, LIMITS)
    with pytest.raises(InvalidArgumentError, match=r"16 tokens.*context of 16 leaves at most 15"):
        check_length("text", 16, LIMITS)
    with pytest.raises(InvalidArgumentError, match="has no tokens"):
        check_length("text", 0, LIMITS)


@pytest.mark.parametrize(
    ("request_", "path", "most"),
    [
        (GenerateRequest(prompts=[Prompt()] * 257), "prompts", 256),
        (ChatRequest(messages=[ChatMessage()] * 16_385), "messages", 16_384),
        (ChatRequest(tools=[Tool()] * 1025), "tools", 1024),
        (ask(stop=[""] * 17), "options.stop", 16),
        (ask(bad_words=[""] * 65), "options.bad_words", 64),
        (
            GenerateRequest(options=GenerationOptions(sampling=SamplingParams(logit_bias=[LogitBias()] * 1025))),
            "options.sampling.logit_bias",
            1024,
        ),
    ],
)
def test_lists_are_counted_before_a_request_waits(request_, path, most):
    with pytest.raises(InvalidArgumentError) as refused:
        check_counts(request_)
    assert refused.value.violations == (FieldViolation(path, f"must have at most {most} entries, has {most + 1}"),)
    check_counts(GenerateRequest(prompts=[Prompt()] * 256))


def test_what_is_larger_here_than_on_its_way_counts_so():
    calls = chat(ChatMessage(tool_calls=[ToolCall()] * 1000))
    arguments = chat(template_arguments=Struct(fields={"a": Value(list_value=ListValue(values=[Value()] * 1000))}))
    assert held_bytes(ask()) == ask().ByteSize()
    assert held_bytes(calls) == calls.ByteSize() + 128 * 1001
    size = arguments.template_arguments.ByteSize()
    assert held_bytes(arguments) == arguments.ByteSize() + 128 + 20 * size
