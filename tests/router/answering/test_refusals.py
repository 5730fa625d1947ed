"""What a worker refuses reaches the client as a fault of the client's own message."""

import pytest

from fissile.errors import (
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from fissile.v1 import RequestOutput, StructuredOutput
from router.answering.refusals import error_of
from router.asking.answer_grammar import AnswerGrammar
from router.asking.spec import Prompt

PROMPT = Prompt("prompts[2].text", [1])


def refused(error, detail, field=""):
    return error_of(RequestOutput(error_code=error.code.value[0], detail=detail, field=field), PROMPT)


@pytest.mark.parametrize(
    ("path", "of_client"),
    [
        ("sampling.structured_output.json_schema", "options.sampling.structured_output.json_schema"),
        ("sampling.logit_bias[3].token_id", "options.sampling.logit_bias[3].token_id"),
        ("stop_token_ids", "options.stop_token_ids"),
        ("stop_token_sequences[1].token_ids", "options.stop_token_sequences[1].token_ids"),
        ("max_tokens", "options.max_tokens"),
        ("min_tokens", "options.min_tokens"),
        ("ignore_eos", "options.ignore_eos"),
        ("prompt_token_ids", "prompts[2].text"),
        ("sequences", "options.n"),
        ("sequences[3].token_ids", "options.n"),
        ("request_id", "request_id"),
    ],
)
@pytest.mark.parametrize("kind", [InvalidArgumentError, UnimplementedError])
def test_fields_are_named_as_the_client_wrote_them(kind, path, of_client):
    error = refused(kind, "is 3: too much", path)
    assert type(error) is kind
    assert error.violations == (FieldViolation(of_client, "is 3: too much"),)
    assert error.message == f"{of_client}: is 3: too much"


def test_words_without_a_field_stay_as_they_are():
    error = refused(InvalidArgumentError, "max_tokens: at all")
    assert (error.message, error.violations) == ("max_tokens: at all", ())


@pytest.mark.parametrize("kind", [ResourceExhaustedError, UnavailableError])
def test_another_worker_may_take_it(kind):
    error = refused(kind, "the queue is full")
    assert (type(error), error.retry_after, error.message) == (kind, 1.0, "the queue is full")


def test_any_other_code_is_our_fault():
    error = error_of(RequestOutput(error_code=6), "text")
    assert (type(error), error.message) == (InternalError, "the worker failed on this request")


@pytest.mark.parametrize(
    ("detail", "field", "text"),
    [
        ("part_1: unclosed group", "tools[4].parameters", "unclosed group"),
        ("part_0: no text matches it", "options.sampling.structured_output.regex", "no text matches it"),
        (
            "is 2000000 bytes long; at most 1048576 is needed",
            "tools",
            "is 2000000 bytes long; at most 1048576 is needed",
        ),
    ],
)
def test_parts_of_a_grammar_that_the_router_wrote_are_the_fields_they_came_from(detail, field, text):
    fields = {"part_0": "options.sampling.structured_output.regex", "part_1": "tools[4].parameters"}
    prompt = Prompt("messages", [1], None, AnswerGrammar(StructuredOutput(), fields))
    output = RequestOutput(
        error_code=InvalidArgumentError.code.value[0], field="sampling.structured_output.composite", detail=detail
    )
    assert error_of(output, prompt).violations == (FieldViolation(field, text),)
