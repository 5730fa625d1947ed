"""Messages of the contract as JSON: reasoning, tool calls, ends, log probabilities."""

import math

import pytest

from fissile.errors import DeadlineExceededError, InternalError
from fissile.v1 import (
    ChatDelta,
    ChatResponse,
    Finish,
    FinishReason,
    TokenLogprob,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from router.http.answers import Envelope, finish_reason
from router.http.chat import ChatWriter
from router.http.logprobs import CompletionLogprobs, chat_logprobs

EOS = Finish(reason=FinishReason.FINISH_REASON_EOS)
LENGTH = Finish(reason=FinishReason.FINISH_REASON_LENGTH)


def writer(**options):
    return ChatWriter(Envelope("id", "toy", created=1), **options)


def test_reasoning_and_tool_calls_of_a_whole_answer():
    parts = [
        ToolCallDelta(index=0, id="c0", name="f", arguments='{"a":'),
        ToolCallDelta(index=1, id="c1", name="g", arguments="{}"),
        ToolCallDelta(index=0, arguments="1}"),
    ]
    message = ChatResponse(
        completions=[ChatDelta(reasoning="r", tool_calls=parts, finish=EOS)],
        usage=Usage(num_prompt_tokens=1, num_completion_tokens=2, num_cached_tokens=1, num_reasoning_tokens=1),
    )
    answer = writer().whole(message)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "reasoning_content": "r",
                "tool_calls": [
                    {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
                    {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_reasoning_and_tool_calls_of_a_stream():
    out = writer()
    deltas = [
        ChatDelta(reasoning="r"),
        ChatDelta(content="c"),
        ChatDelta(tool_calls=[ToolCallDelta(id="c0", name="f")]),
        ChatDelta(tool_calls=[ToolCallDelta(arguments="{}")]),
        ChatDelta(finish=EOS),
    ]
    choices = [chunk["choices"][0] for d in deltas for chunk in out.chunks(ChatResponse(completions=[d]))]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "reasoning_content": "r"},
        {"content": "c"},
        {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "tool_calls"]


def test_a_call_that_was_cut_off_ends_by_length():
    delta = ChatDelta(tool_calls=[ToolCallDelta(id="c0", name="f", arguments="{")], finish=LENGTH)
    assert writer().whole(ChatResponse(completions=[delta]))["choices"][0]["finish_reason"] == "length"


def test_choices_are_in_order():
    message = ChatResponse(completions=[ChatDelta(index=1, content="b"), ChatDelta(index=0, content="a")])
    assert [choice["message"]["content"] for choice in writer().whole(message)["choices"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("EOS", "stop"),
        ("STOP_TOKEN", "stop"),
        ("STOP_SEQUENCE", "stop"),
        ("STOP_STRING", "stop"),
        ("LENGTH", "length"),
        ("MODEL_LENGTH", "length"),
    ],
)
def test_ends(reason, word):
    assert finish_reason(Finish(reason=FinishReason.Value(f"FINISH_REASON_{reason}"))) == word


@pytest.mark.parametrize(
    ("reason", "error"),
    [("DEADLINE", DeadlineExceededError), ("ABORTED", InternalError), ("ERROR", InternalError)],
)
def test_ends_that_are_errors(reason, error):
    with pytest.raises(error):
        finish_reason(Finish(reason=FinishReason.Value(f"FINISH_REASON_{reason}")))


def token(token_id, text, logprob, rank):
    return TokenLogprob(token_id=token_id, text=text, logprob=logprob, rank=rank)


def test_the_chosen_token_may_be_among_the_most_likely():
    entry = TokenLogprobs(logprobs=[token(2, b"b", -1.5, 2), token(1, b"a", -0.5, 1), token(2, b"b", -1.5, 2)])
    (content,) = chat_logprobs([entry], 2)["content"]
    assert [top["token"] for top in content["top_logprobs"]] == ["a", "b"]
    assert CompletionLogprobs().feed([entry], 2)["top_logprobs"] == [{"a": -0.5, "b": -1.5}]


def test_the_chosen_token_may_be_none_of_them():
    entry = TokenLogprobs(logprobs=[token(3, b"c", -3.5, 3), token(1, b"a", -0.5, 1)])
    (content,) = chat_logprobs([entry], 1)["content"]
    assert [top["token"] for top in content["top_logprobs"]] == ["a"]
    assert CompletionLogprobs().feed([entry], 1)["top_logprobs"] == [{"a": -0.5, "c": -3.5}]


def test_a_chosen_token_that_is_the_most_likely_stands_among_these_once():
    """It comes twice: as the chosen one, and as the first of the others."""
    entry = TokenLogprobs(logprobs=[token(1, b"a", -0.5, 1), token(1, b"a", -0.5, 1), token(2, b"b", -1.5, 2)])
    (content,) = chat_logprobs([entry], 2)["content"]
    assert [top["token"] for top in content["top_logprobs"]] == ["a", "b"]
    assert CompletionLogprobs().feed([entry], 2)["top_logprobs"] == [{"a": -0.5, "b": -1.5}]


def test_a_probability_of_zero_is_a_number():
    (content,) = chat_logprobs([TokenLogprobs(logprobs=[token(1, b"a", -math.inf, 1)])], 0)["content"]
    assert content["logprob"] == -9999.0


def test_parts_of_a_character_in_a_chat():
    (content,) = chat_logprobs([TokenLogprobs(logprobs=[token(1, b"\xc3", -1, 1)])], 0)["content"]
    assert (content["token"], content["bytes"]) == ("\ufffd", [0xC3])
