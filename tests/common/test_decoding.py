"""What protobuf refuses gets an error that names the field where it can."""

import pytest

from common.decoding import decode
from fissile.errors import InvalidArgumentError
from fissile.v1 import ChatMessage, ChatRequest, GenerateRequest, GenerationOptions


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
