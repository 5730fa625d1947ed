"""What protobuf refuses gets an error that names the field where it can."""

import asyncio

import pytest

from common import decoding
from fissile.errors import MAX_VIOLATIONS, InvalidArgumentError
from fissile.v1 import ChatMessage, ChatRequest, GenerateRequest, GenerationOptions
from tests.fakes.deep import nested_arguments


def decode(raw, parse):
    return asyncio.run(decoding.decode(raw, parse))


def test_a_good_message_is_decoded():
    request = GenerateRequest(text="naïve")
    assert decode(request.SerializeToString(), GenerateRequest.FromString) == request


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (GenerateRequest(text="XY"), ["text"]),
        (GenerateRequest(text="XY", options=GenerationOptions(stop=["ok", "XY"])), ["text", "options.stop"]),
        (ChatRequest(messages=[ChatMessage(content="ok"), ChatMessage(content="XY")]), ["messages.content"]),
    ],
)
def test_strings_that_are_not_utf8_are_named(request_, fields):
    raw = request_.SerializeToString().replace(b"XY", b"\xff\xfe")
    with pytest.raises(InvalidArgumentError) as caught:
        decode(raw, type(request_).FromString)
    assert [v.field for v in caught.value.violations] == fields


@pytest.mark.parametrize("raw", [b"\xff" * 40, b"\x1a\xff\xff", b"\x00"])
def test_bytes_that_are_no_message(raw):
    with pytest.raises(InvalidArgumentError, match="is not a valid"):
        decode(raw, GenerateRequest.FromString)


@pytest.mark.parametrize("num", [34, 333, 20_000])
def test_what_nests_too_deeply_is_named(num):
    assert decode(nested_arguments(30), ChatRequest.FromString).HasField("template_arguments")
    with pytest.raises(InvalidArgumentError, match="template_arguments: must not nest deeper than 100 messages"):
        decode(nested_arguments(num), ChatRequest.FromString)


def test_only_the_first_few_faults_are_named():
    request = ChatRequest(messages=[ChatMessage(content="XY") for _ in range(1000)])
    with pytest.raises(InvalidArgumentError) as caught:
        decode(request.SerializeToString().replace(b"XY", b"\xff\xfe"), ChatRequest.FromString)
    assert len(caught.value.violations) == MAX_VIOLATIONS


@pytest.mark.parametrize("cut", range(1, 12))
def test_bytes_that_end_anywhere(cut):
    raw = ChatRequest(messages=[ChatMessage(content="text")]).SerializeToString()
    with pytest.raises(InvalidArgumentError):
        decode(raw[:-cut] + b"\xff" * 11 if cut % 2 else raw + b"\x1a\x7f" + b"\xff" * cut, ChatRequest.FromString)
