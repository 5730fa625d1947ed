"""Messages with channels and recipients."""

import pytest

from tests.router.formats.answers import Answer, parser, read, shown

CALL_BODY = '<|message|>{"x": 1}'


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|> json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>analysis to=functions.f code",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        " to=f<|channel|>commentary json",
        "<|channel|>commentary to=functions.f",
    ],
)
def test_a_recipient_makes_a_call(header):
    assert read("harmony", header + CALL_BODY) == Answer("", "", [["f", '{"x": 1}']])


def test_the_flush_ends_a_call_without_its_marker():
    text = f"<|channel|>commentary to=functions.f{CALL_BODY}"
    assert read("harmony", text) == read("harmony", text + "<|call|>")


def test_two_calls_one_behind_the_other():
    one = f"<|channel|>commentary to=functions.f{CALL_BODY}<|call|>"
    two = f"<|start|>assistant<|channel|>commentary to=functions.g{CALL_BODY}<|call|>"
    assert read("harmony", one + two) == Answer("", "", [["f", '{"x": 1}'], ["g", '{"x": 1}']])


def test_a_text_without_header_is_content():
    assert read("harmony", "Hi there") == Answer("Hi there")
    long = "Hi there, this is a text of more words than a header has"
    assert read("harmony", long) == Answer(long)
    assert "".join(event.text for event in shown("harmony", long, " and")[1]) == " and"
    assert read("harmony", "Hi\nthere<|end|>") == Answer("Hi\nthere")


def test_a_header_that_is_cut_off():
    assert read("harmony", "<|channel|>final<|message|>a<|end|><|start|>assistant<|chan") == Answer("a")
    cut = "<|start|>assistant<|channel|>commentary to=functions.f"
    assert read("harmony", "<|channel|>final<|message|>a<|end|>" + cut) == Answer("a" + cut)


def test_a_continued_message_of_harmony():
    final = "<|start|>assistant<|channel|>final<|message|>Pa"
    assert read("harmony", "ris and more<|return|>", prompt=final) == Answer("ris and more")
    thinking = "<|start|>assistant<|channel|>analysis<|message|>h"
    assert parser("harmony", thinking).is_reasoning
    rest = "m<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    assert read("harmony", rest, prompt=thinking) == Answer("Yes", "m")


def test_markers_of_harmony_where_they_do_not_belong_are_dropped():
    text = "<|channel|>final<|message|>a<|message|>b<|constrain|>c<|end|>d<|channel|>analysis<|message|>e"
    assert read("harmony", text) == Answer("abcd", "e")
