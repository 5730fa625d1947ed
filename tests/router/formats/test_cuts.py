"""The joined answer does not depend on how the text was cut, nothing of a marker is shown, nothing is lost."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.formats.registry import FORMATS
from tests.router.formats.answers import Answer, read, shown

WHOLE = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": "a\\"}b"}}\n</tool_call>\n'
        "<tool_call>\n<function=g>\n<parameter=y>\n1\n</parameter>\n</function>\n</tool_call>",
        Answer("Let me see.\n", "", [["f", '{"x": "a\\"}b"}'], ["g", '{"y": 1}']]),
    ),
    "qwen3": (
        '<think>\n1 < 2\n</think>\n\nYes.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        Answer("Yes.\n\n", "1 < 2", [["f", "{}"]]),
    ),
    "deepseek": (
        "<think>\nhm\n</think>\n\nWell.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"x": [1, 2]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"y": {}}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        Answer("Well.", "hm", [["f", '{"x": [1, 2]}'], ["g", '{"y": {}}']]),
    ),
    "glm": (
        "\n<think>hm</think>\nWell.\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>[1]</arg_value>\n"
        "<arg_key>y</arg_key>\n<arg_value>a b</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
        Answer("Well.\n", "hm", [["f", '{"x": [1], "y": "a b"}'], ["g", "{}"]]),
    ),
    "harmony": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
        "<|start|>assistant<|channel|>final<|message|> Done.<|return|>",
        Answer("I look. Done.", "hm", [["f", '{"x": 1}']]),
    ),
}
FRAGMENTS = ["\n", " ", "a", "the word", "{", "}", '"', "\\", ":", ",", "<", "f"]
CALL = '{"name": "f", "arguments": {"a": "b"}}'


def fragments(name):
    """Markers, their beginnings, and what may stand between them."""
    markers = sorted(FORMATS[name].markers)
    extra = ["<function=", "<parameter=k>", "```json", "to=functions.f", "analysis", "assistant", CALL]
    return [*markers, *(marker[: len(marker) // 2] for marker in markers), *FRAGMENTS, *extra]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_at_every_cut(name):
    text, expected = WHOLE[name]
    assert read(name, text) == expected
    for cut in range(len(text)):
        assert read(name, text[:cut], text[cut:]) == expected, cut


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_whole_answer_in_small_pieces(name, size):
    text, expected = WHOLE[name]
    assert read(name, *(text[i : i + size] for i in range(0, len(text), size))) == expected


@pytest.mark.parametrize("name", WHOLE)
def test_the_beginning_of_an_answer_never_shows_a_marker_or_fails(name):
    text, expected = WHOLE[name]
    for end in range(len(text)):
        events = [event for piece in shown(name, *text[:end])[:-1] for event in piece]
        answer = Answer()
        for event in events:
            answer.add(event)
        assert expected.content.startswith(answer.content)
        assert expected.reasoning.startswith(answer.reasoning)
        for want, got in zip(expected.calls, answer.calls, strict=False):
            assert want[0] == got[0]
            assert want[1].startswith(got[1])


@pytest.mark.parametrize("name", WHOLE)
@given(data=st.data())
def test_any_text_at_any_cut(name, data):
    text = "".join(data.draw(st.lists(st.sampled_from(fragments(name)), max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    whole = read(name, text)
    bounds = [0, *cuts, len(text)]
    assert read(name, *(text[i:j] for i, j in pairwise(bounds))) == whole
    assert read(name, *text) == whole


@pytest.mark.parametrize("name", ["hermes", "qwen3", "deepseek", "glm"])
@given(text=st.text("ab \n<>tool_c{}/｜▁", max_size=40))
def test_text_without_markers_is_content_as_it_is(name, text):
    assert read(name, *text) == Answer(text)


@pytest.mark.parametrize("name", ["hermes", "qwen3", "deepseek", "glm"])
def test_text_that_begins_no_marker_is_shown_at_once(name):
    got = shown(name, "Well", ", 1 ", "<2", " and\n", "so", "\n\n\n", "a<")
    texts = ["".join(event.text for event in events) for events in got]
    assert texts == ["Well", ", 1 ", "<2", " and\n", "so", "\n\n\n", "a", "<"]


def test_harmony_holds_back_beginnings_of_markers_alone():
    got = shown("harmony", "<|channel|>final<|message|>Well", "\n", "<2", " <", "|end", "|>")
    texts = ["".join(event.text for event in events) for events in got]
    assert texts == ["Well", "\n", "<2", " ", "", "", ""]
