"""JSON to typed bodies: what is refused, and which field is named."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fissile.errors import MAX_VIOLATIONS, InvalidArgumentError
from router.http.bodies import CompletionBody
from router.http.chat_body import ChatBody
from router.http.json_body import BEGINNING_BYTES, IGNORED, parse_body
from router.http.requests import chat_request, completion_request
from tests.fuzzing import examples

COMPLETION = {"prompt": "x"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def completion(**fields):
    return parse_body(json.dumps({**COMPLETION, **fields}).encode(), CompletionBody)


def chat(**fields):
    return parse_body(json.dumps({**CHAT, **fields}).encode(), ChatBody)


def violations(parse, **fields):
    with pytest.raises(InvalidArgumentError) as raised:
        parse(**fields)
    return {v.field: v.description for v in raised.value.violations}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ["x"]),
        (["x"], ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
        ([[]], [[]]),
    ],
)
def test_prompts(prompt, prompts):
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize("prompt", [None, 1, [], {}, ["x", 1], [1, "x"], [1.0], [True], [-1], [2**32], [[1], "x"]])
def test_no_prompts(prompt):
    assert set(violations(completion, prompt=prompt)) == {"prompt"}


def test_null_is_absent():
    names = ("max_tokens", "temperature", "n", "stop", "logit_bias", "stream", "response_format", "seed", "logprobs")
    assert completion(**dict.fromkeys(names)) == completion()


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_fields_that_say_nothing_about_the_answer(name):
    assert chat(**{name: "x"}) == chat()
    assert completion(**{name: {"x": 1}}) == completion()


@pytest.mark.parametrize(
    ("parse", "fields", "field"),
    [
        (completion, {"nonsense": 1}, "nonsense"),
        (completion, {"messages": []}, "messages"),
        (completion, {"temperature": "0.5"}, "temperature"),
        (completion, {"temperature": True}, "temperature"),
        (completion, {"max_tokens": 1.5}, "max_tokens"),
        (completion, {"max_tokens": -1}, "max_tokens"),
        (completion, {"n": 2**32}, "n"),
        (completion, {"top_k": 2**31}, "top_k"),
        (completion, {"seed": 2**64}, "seed"),
        (completion, {"stop": [1]}, "stop[0]"),
        (completion, {"stop": 1}, "stop"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"suffix": "end"}, "suffix"),
        (completion, {"best_of": 2}, "best_of"),
        (completion, {"stream_options": {"include_usage": True}}, "stream_options"),
        (completion, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (completion, {"logit_bias": {"a": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"-1": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"1": "a"}}, "logit_bias"),
        (completion, {"logit_bias": {str(2**32): 1}}, "logit_bias"),
        (completion, {"logit_bias": [1]}, "logit_bias"),
        (completion, {"structured_outputs": {}}, "structured_outputs"),
        (completion, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        (chat, {"messages": "x"}, "messages"),
        (chat, {"messages": [{"role": "user", "content": "x"}, {"content": "x"}]}, "messages[1].role"),
        (chat, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (chat, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        (chat, {"top_logprobs": 1}, "top_logprobs"),
        (chat, {"logprobs": 1}, "logprobs"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (chat, {"tool_choice": "must"}, "tool_choice"),
        (chat, {"tool_choice": {"type": "function"}}, "tool_choice"),
        (chat, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        (chat, {"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        (chat, {"parallel_tool_calls": 0}, "parallel_tool_calls"),
        (chat, {"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call"),
        (chat, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (chat, {"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        (chat, {"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools[0].function.name"),
        (chat, {"response_format": {"type": "xml"}}, "response_format.type"),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format"),
        (
            chat,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            chat,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
    ],
)
def test_the_field_at_fault_is_named(parse, fields, field):
    assert field in violations(parse, **fields)


def test_all_faults_are_named_at_once():
    assert set(violations(chat, temperature="hot", n=-1, nonsense=0)) == {"temperature", "n", "nonsense"}


def test_faults_are_for_people():
    assert violations(completion, nonsense=1)["nonsense"] == "is no field of this request"
    wanted = "must be none, auto, required or an object that names tools"
    assert violations(chat, tool_choice="must") == {"tool_choice": wanted}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "data:x"}}, "this model takes no images, only text"),
        ({"type": "input_audio", "input_audio": {}}, "this model takes no audio, only text"),
        ({"type": "file", "file": {"file_id": "x"}}, "this model takes no files, only text"),
        ({"type": "video_url", "video_url": {}}, "this model takes no video, only text"),
        ({"type": "smell"}, "'smell' is no type of content here; it is text"),
    ],
)
def test_content_that_is_no_text_is_refused_in_plain_words(part, said):
    content = [{"type": "text", "text": "What is this?"}, part]
    found = violations(chat, messages=[{"role": "user", "content": content}])
    assert found == {"messages[0].content[1].type": said}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "no valid JSON"),
        (b"{", "no valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt": "\xff"}', "no valid UTF-8 at byte 12"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "x", "temperature": -Infinity}', "-Infinity is no JSON number"),
        (b"[" * 100_000, "no valid JSON"),
        (b'{"prompt": "x", "n": ' + b"9" * 10_000 + b"}", "no valid JSON"),
    ],
)
def test_bodies_that_are_none(raw, said):
    with pytest.raises(InvalidArgumentError, match=said):
        parse_body(raw, CompletionBody)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (rb'{"prompt": "a\ud800"}', "prompt"),
        (rb'{"prompt": "x", "stop": ["a", "\udc00"]}', "stop[1]"),
        (rb'{"prompt": "x", "structured_outputs": {"json": {"a": {"b": "\ud83d"}}}}', "structured_outputs.json.a.b"),
        (rb'{"prompt": "x", "metadata": {"\ud800": 1}}', "metadata"),
    ],
)
def test_half_a_surrogate_pair_names_its_field(raw, field):
    with pytest.raises(InvalidArgumentError) as raised:
        parse_body(raw, CompletionBody)
    assert [v.field for v in raised.value.violations] == [field]


def test_whole_surrogate_pairs_are_text():
    assert parse_body(rb'{"prompt": "\ud83d\ude00"}', CompletionBody).prompt == ["😀"]


def test_json_nested_too_deeply():
    schema: dict = {}
    for _ in range(101):
        schema = {"a": schema}
    fault = violations(completion, structured_outputs={"json": schema})
    assert "nested deeper than 100" in " ".join(fault.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)


@examples(80)
@given(st.data())
def test_whatever_json_comes_it_is_a_request_or_a_typed_error(data):
    """Nothing reaches protobuf that protobuf refuses."""
    for cls, base, translate in ((CompletionBody, COMPLETION, completion_request), (ChatBody, CHAT, chat_request)):
        names = st.sampled_from(sorted(cls.model_fields))
        fields = data.draw(st.dictionaries(names, json_values, max_size=4))
        raw = json.dumps({**base, **fields}).encode()
        with suppress(InvalidArgumentError):
            translate(parse_body(raw, cls), "id", 1.0)


MANY = 200_000
LARGE = {
    "messages": (b'{"messages": [' + b",".join([b"{}"] * MANY) + b"]}", "at most 100000 objects"),
    "names": (b"{" + b",".join(b'"%d":1' % i for i in range(MANY)) + b"}", "at most 100000 objects"),
    "depth": (b'{"a":' * 200 + b"1" + b"}" * 200, "nested deeper than 128 levels"),
    "depth of text": (b'{"a":' * 900 + b'"\\ud800"' + b"}" * 900, "nested deeper than 128 levels"),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_much_is_counted_before_it_is_looked_at(name):
    raw, said = LARGE[name]
    with pytest.raises(InvalidArgumentError) as caught:
        parse_body(raw, ChatBody)
    assert said in caught.value.message and not caught.value.violations


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [{}] * 30_000}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{}] * 30_000}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user"}], "tools": [{"type": "x"}] * 30_000}, "tools[0].type"),
        ({"messages": [{"role": "user"}], "stop": [1] * MANY}, "stop[0]"),
        ({"messages": [{"role": "user"}], "banned_token_ids": ["x"] * MANY}, "banned_token_ids[0]"),
    ],
)
def test_of_very_many_faults_the_first_are_named(fields, field):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_body(json.dumps(fields).encode(), ChatBody)
    assert caught.value.violations[0].field == field
    assert len(caught.value.violations) <= MAX_VIOLATIONS and len(caught.value.message) < 1000


def test_of_very_many_unknown_fields_the_first_are_named():
    with pytest.raises(InvalidArgumentError) as caught:
        parse_body(json.dumps({"messages": []} | {f"x{i}": 1 for i in range(50_000)}).encode(), ChatBody)
    assert len(caught.value.violations) == MAX_VIOLATIONS and len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"prompt":[%s]}' % b",".join([b"{}"] * 200_000), "at most 100000 objects"),
        (b'{"prompt":[%s]}' % b",".join([b"1"] * 300_000), "at most 250000 values"),
        (b'{"prompt":"\\"%s' % (b"[" * 200_000), "no valid JSON"),
        (b"[" * 200_000, "at most 100000 objects"),
        (b'{"prompt":"%s","stop":%s' % (b"a" * BEGINNING_BYTES, b"[" * 200_000), "at most 100000 objects"),
        (b'{"prompt":[%s]}' % b",".join([b'""'] * 600_000), "at most 500000 strings"),
    ],
)
def test_bodies_of_many_parts_are_refused_before_they_are_read(raw, said):
    with pytest.raises(InvalidArgumentError, match=said):
        parse_body(raw, CompletionBody)


@pytest.mark.parametrize("shift", range(6))
def test_brackets_and_quotes_inside_of_a_text_are_text(shift):
    """Wherever in one of these the beginning ends that is looked at alone."""
    text = "a" * shift + '[{"\\' * 150_000
    assert completion(prompt=text).prompt == [text]
