"""Tool calls whose arguments are JSON."""

import pytest

from tests.router.formats.answers import Answer, read, shown

JSON_CALL = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (JSON_CALL, '{"x": 1}'),
        ('{ "name" : "f" ,\n"arguments":{ "x":1 } }', '{ "x":1 }'),
        ('{"arguments": {"x": 1}, "name": "f"}', '{"x": 1}'),
        ('{"id": 7, "name": "f", "arguments": {"x": [{}]}, "more": [null, "}"]}', '{"x": [{}]}'),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', '{"x": 1}'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": {"x": 1}', '{"x": 1}'),
        ('{"name": "f", "arguments": {"x": 1}}}', '{"x": 1}'),
        (
            '{"name": "f", "arguments": {"x": "</tool_call>", "é": "\\\\\\"{"}}',
            '{"x": "</tool_call>", "é": "\\\\\\"{"}',
        ),
    ],
)
def test_a_call_in_json(call, arguments):
    assert read("hermes", f"<tool_call>\n{call}\n</tool_call>") == Answer("", "", [["f", arguments]])
    assert read("hermes", *f"<tool_call>{call}</tool_call>") == Answer("", "", [["f", arguments]])


@pytest.mark.parametrize(
    "call",
    [
        "none",
        "{}",
        '{"arguments": {"x": 1}}',
        '{"name": "", "arguments": {"x": 1}}',
        '{"name": 1, "arguments": {"x": 1}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "no"}',
        '{"name": "f" "arguments": {}}',
        '{"name": "f", "parameters": {"x": 1}}',
        "{name: f}",
        '[{"name": "f", "arguments": {}}]',
        '{"name": "\\x", "arguments": {}}',
        "<function=>",
    ],
)
def test_what_is_no_call_is_content(call):
    text = f"a\n<tool_call>\n{call}\n</tool_call>"
    assert read("hermes", text) == Answer(text)


@pytest.mark.parametrize("end", range(1, len(f"<tool_call>\n{JSON_CALL}\n</tool_call>")))
def test_a_call_that_is_cut_off_loses_nothing(end):
    text = f"<tool_call>\n{JSON_CALL}\n</tool_call>"[:end]
    answer = read("hermes", "a" + text)
    start = len('<tool_call>\n{"name": "f", "arguments": ')
    if end <= start:
        assert answer == Answer("a" + text)
    else:
        assert answer == Answer("a", "", [["f", text[start : start + len('{"x": 1}')]]])


@pytest.mark.parametrize("call", [JSON_CALL, '{"arguments": {"x": 1}, "name": "f"}', JSON_CALL + "}"])
@pytest.mark.parametrize("end", ["", "\n", "\n</tool"])
def test_the_end_of_the_text_ends_a_whole_call(call, end):
    assert read("hermes", f"<tool_call>\n{call}{end}") == Answer("", "", [["f", '{"x": 1}']])


def test_the_end_of_the_text_ends_a_call_of_the_other_forms():
    text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool"
    assert read("hermes", text) == Answer("", "", [["f", '{"x": 1}']])
    text = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n``'
    assert read("deepseek", text) == Answer("", "", [["f", '{"x": 1}']])
    assert read("deepseek", text + "`\n") == Answer("", "", [["f", '{"x": 1}']])


def test_what_follows_broken_arguments_is_content():
    text = '<tool_call>{"name": "f", "arguments": {"x": 1; "y": 2}}</tool_call>b'
    assert read("hermes", text) == Answer('; "y": 2}}</tool_call>b', "", [["f", '{"x": 1']])


def test_arguments_without_their_brace_end_with_the_call():
    text = '<tool_call>{"name": "f", "arguments": {"x": 1</tool_call>b'
    assert read("hermes", text) == Answer("b", "", [["f", '{"x": 1']])


def test_arguments_are_shown_as_they_come():
    pieces = [
        '<tool_call>{"name": "f", "arguments": ',
        '{"x"',
        ': "a',
        "b\\",
        '"',
        "}</tool_call>",
        '"}}',
        "</tool_call>",
    ]
    texts = ["".join(event.text for event in events if hasattr(event, "text")) for events in shown("hermes", *pieces)]
    assert texts == ["", '{"x"', ': "a', "b", '\\"', "}</tool_call>", '"}', "", ""]


def test_a_call_without_the_markers_around():
    text = 'a<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
    assert read("deepseek", text) == Answer("a", "", [["f", '{"x": 1}']])


@pytest.mark.parametrize(
    "call", ["f<｜tool▁sep｜>x", "function<｜tool▁sep｜>f\n```json\n[1]", "f{}", "<｜tool▁sep｜>{}"]
)
def test_what_is_no_call_of_deepseek_is_content(call):
    text = f"<｜tool▁call▁begin｜>{call}"
    assert read("deepseek", text) == Answer(text)
