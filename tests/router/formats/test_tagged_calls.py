"""Tool calls whose arguments stand between tags."""

import json

import pytest

from router.formats.scanner import MAX_WORD
from tests.router.formats.answers import Answer, read, shown

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "unit": {"enum": ["c", "f"]},
            "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "string"}, {"enum": ["1"]}]},
            "number": {"type": "number"},
        },
    }
}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("text", "1", "1"),
        ("text", 'a\n"b"', 'a\n"b"'),
        ("unit", "c", "c"),
        ("maybe", "null", None),
        ("maybe", "a", "a"),
        ("either", "2", "2"),
        ("number", " 1.5 ", 1.5),
        ("number", "many", "many"),
        ("number", "NaN", "NaN"),
        ("unknown", '{"a": [1]}', {"a": [1]}),
        ("unknown", "tr", "tr"),
        ("unknown", "[" * 100_000, "[" * 100_000),
    ],
)
def test_the_schema_says_what_a_value_is(key, value, expected):
    glm = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    coder = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    for name, text in (("glm", glm), ("qwen3", coder)):
        answer = read(name, text, schemas=SCHEMAS)
        assert answer.content == ""
        assert [(call, json.loads(arguments)) for call, arguments in answer.calls] == [("f", {key: expected})]


@pytest.mark.parametrize("schema", [{}, {"properties": None}, {"properties": {"x": True}}, {"properties": {"x": {}}}])
def test_schemas_that_say_nothing(schema):
    text = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    assert read("glm", text, schemas={"f": schema}).calls == [["f", '{"x": 1}']]


@pytest.mark.parametrize("text", ["<tool_call> is a tag", "<tool_call></tool_call>", "<tool_call>f", "<tool_call>f<b>"])
def test_what_is_no_call_in_tags_is_content(text):
    assert read("glm", text) == Answer(text)


def test_prose_behind_an_opening_tag_is_not_held_back_for_long():
    prose = "是" * MAX_WORD
    texts = ["".join(event.text for event in events) for events in shown("glm", "<tool_call>", prose, "是", "的")]
    assert texts == ["", "", f"<tool_call>{prose}是", "的", ""]
    assert read("glm", f"<tool_call>{prose}</tool_call>") == Answer("", "", [[prose, "{}"]])


def test_a_call_in_tags_that_is_cut_off_stays_open():
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2"
    assert read("glm", text) == Answer("<arg_key>b</arg_key><arg_value>2", "", [["f", '{"a": 1']])
