"""A message of too many fields is refused before anything is made of it, and nobody waits for that."""

import asyncio

import pytest

from common import field_count
from common.decoding import decode
from common.field_count import MAX_FIELDS, check_num_fields
from fissile.errors import InvalidArgumentError
from fissile.v1 import ChatMessage, ChatRequest, ExecuteRequest, GenerateRequest, ToolCall
from tests.fakes.deep import delimited

TEXT = "a" * 2 * MAX_FIELDS
"""So that the fields are counted."""


def tag(message, field):
    return message.DESCRIPTOR.fields_by_name[field].number


def check(raw, message=ChatRequest):
    asyncio.run(check_num_fields(raw, message.DESCRIPTOR))


@pytest.mark.parametrize(
    ("message", "field", "entry"),
    [
        (ChatRequest, "messages", b""),
        (ChatRequest, "messages", delimited(tag(ChatMessage, "tool_calls"), b"")),
        (GenerateRequest, "prompts", b""),
        (ExecuteRequest, "commands", b""),
        (GenerateRequest, "model", b"x"),
    ],
)
def test_the_field_that_is_one_too_many_is_named(message, field, entry):
    raw = delimited(tag(message, field), entry) * (MAX_FIELDS + 1)
    with pytest.raises(InvalidArgumentError, match=rf"^{field}: with it the request has more than 131072 fields"):
        check(raw, message)


@pytest.mark.parametrize("is_one_more", [False, True])
def test_fields_inside_of_others_count(is_one_more, monkeypatch):
    """One of the text, one of each message, two of each call, and one of its name."""
    call = ToolCall(name="f")
    request = ChatRequest(chat_template=TEXT, messages=[ChatMessage(tool_calls=[call] * 3)] * 10)
    monkeypatch.setattr(field_count, "MAX_FIELDS", 1 + 10 * (1 + 3 * 2) - is_one_more)
    if is_one_more:
        with pytest.raises(InvalidArgumentError, match=r"^chat_template: "):
            check(request.SerializeToString())
    else:
        check(request.SerializeToString())


UNKNOWN = [
    b"\xf8\x07\xff\x01" * MAX_FIELDS,  # numbers
    b"\xf9\x07" + bytes(8),
    b"\xfd\x07" + bytes(4),
    b"\xfb\x07\xfc\x07" * MAX_FIELDS,  # groups
    delimited(13, b"\x08"),
]


@pytest.mark.parametrize("raw", UNKNOWN)
def test_a_field_behind_any_other_is_seen(raw):
    few = raw[: len(raw) // MAX_FIELDS or len(raw)]
    asyncio.run(decode(few + delimited(6, TEXT.encode()), ChatRequest.FromString))
    with pytest.raises(InvalidArgumentError, match=r"^messages: "):
        check(few + delimited(3, b"") * MAX_FIELDS)


@pytest.mark.parametrize("end", [b"\x1a", b"\x1a\x7f", b"\xff", b"\xff" * 300_000, b"\x18", b"\x1f"])
def test_what_is_no_message_is_left_to_protobuf(end):
    raw = delimited(6, TEXT.encode()) + end
    check(raw)
    with pytest.raises(InvalidArgumentError, match="is not a valid"):
        asyncio.run(decode(raw, ChatRequest.FromString))


def test_others_go_on_meanwhile():
    raw = delimited(3, b"") * (MAX_FIELDS + 1)

    async def scenario():
        checking = asyncio.create_task(check_num_fields(raw, ChatRequest.DESCRIPTOR))
        num_turns = 0
        while not checking.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert checking.exception()
        return num_turns

    assert asyncio.run(scenario()) > MAX_FIELDS / field_count.SLICE
