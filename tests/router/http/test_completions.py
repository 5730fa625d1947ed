"""POST /v1/completions through a router and a fake worker."""

import pytest

from router.answering import prompt_logprobs
from tests.fakes import tokenizer as toys
from tests.fakes.asked import EOS
from tests.fakes.worker import FakeWorker, says
from tests.router.http.front import choices_of, complete, events

USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 3,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def test_a_whole_answer():
    response = complete(FakeWorker(says("bc")))
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1.7e9
    assert answer == {
        "object": "text_completion",
        "model": "toy",
        "choices": [{"index": 0, "text": "bc", "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    }


def test_the_id_is_the_requests_and_stands_in_a_header():
    worker = FakeWorker(says("bc"))
    response = complete(worker)
    assert response.json()["id"] == response.headers["x-request-id"] == worker.received[0].request_id


def test_a_stream():
    response = complete(FakeWorker(says("bcd")), stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response)
    assert choices_of(chunks) == {0: ("bcd", "stop")}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_in_a_stream_comes_last_and_alone():
    *chunks, last = events(complete(FakeWorker(says("bc")), stream=True, stream_options={"include_usage": True}))
    assert choices_of(chunks) == {0: ("bc", "stop")}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], USAGE)


@pytest.mark.parametrize("stream", [False, True])
def test_limits_and_stops(stream):
    def end(worker, **body):
        response = complete(worker, stream=stream, **body)
        (choice,) = choices_of(events(response) if stream else [response.json()]).values()
        return choice

    long = says("b" * 50, eos=False)
    assert end(FakeWorker(long)) == ("b" * 16, "length")
    assert end(FakeWorker(long), max_tokens=2) == ("bb", "length")
    assert end(FakeWorker(says("abcdef")), stop="cd") == ("ab", "stop")
    assert end(FakeWorker(says("abcdef")), stop=["x", "b"], include_stop_str_in_output=True) == ("ab", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(stream):
    worker = FakeWorker(lambda sequence: says("bcd"[sequence.index])(sequence))
    response = complete(worker, n=3, stream=stream)
    choices = choices_of(events(response) if stream else [response.json()])
    assert choices == {0: ("b", "stop"), 1: ("c", "stop"), 2: ("d", "stop")}


def test_text_outside_ascii():
    text = "naïve 😀\u2028漢"
    assert complete(FakeWorker(says(text)), max_tokens=99).json()["choices"][0]["text"] == text
    assert choices_of(events(complete(FakeWorker(says(text)), max_tokens=99, stream=True))) == {0: (text, "stop")}


LOGPROBS = {
    "tokens": ["b", "c", "<|im_end|>"],
    "token_logprobs": [-2.5, -2.5, -2.5],
    "text_offset": [0, 1, 2],
}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(stream):
    response = complete(FakeWorker(says("bc")), logprobs=1, stream=stream)
    parts = [chunk["choices"][0]["logprobs"] for chunk in (events(response) if stream else [response.json()])]
    joined = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    tops = joined.pop("top_logprobs")
    assert joined == LOGPROBS
    # The fake's most likely token, and the chosen one.
    assert [sorted(top.values()) for top in tops] == [[-2.5, -0.5]] * 3
    assert "b" in tops[0]


def test_logprobs_of_the_chosen_tokens_alone():
    logprobs = complete(FakeWorker(says("b")), logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"b": -2.5}, {"<|im_end|>": -2.5}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "text"), [("hello", "hello"), ([0, 100, 101], None)])
def test_echo(prompt, text, stream):
    worker = FakeWorker(says("bc"))
    response = complete(worker, prompt=prompt, echo=True, n=2, stream=stream)
    choices = choices_of(events(response) if stream else [response.json()])
    prefix = text or choices[0][0].removesuffix("bc")
    assert prefix and "<|bos|>" not in prefix
    assert choices == {0: (prefix + "bc", "stop"), 1: (prefix + "bc", "stop")}


@pytest.mark.parametrize("part", [8192, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_has_those_of_the_prompt(monkeypatch, stream, part):
    """The first token, here the one that the tokenizer adds, has none. Those of a long prompt come in parts."""
    monkeypatch.setattr(prompt_logprobs, "MAX_PART_ENTRIES", part)
    response = complete(FakeWorker(says("bc"), prompt_chunk=1), prompt="xy", echo=True, logprobs=1, stream=stream)
    parts = [chunk["choices"][0]["logprobs"] for chunk in (events(response) if stream else [response.json()])]
    joined = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    assert joined["tokens"] == ["<|bos|>", "x", "y", "b", "c", "<|im_end|>"]
    assert joined["token_logprobs"] == [None, -2.5, -2.5, -2.5, -2.5, -2.5]
    assert joined["top_logprobs"][0] is None
    assert joined["text_offset"] == [0, 7, 8, 9, 10, 11]


def test_a_token_that_is_part_of_a_character_keeps_its_bytes():
    logprobs = complete(FakeWorker(says("é")), logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(stream):
    """Choices are numbered prompt by prompt."""
    worker = FakeWorker(lambda sequence: says("bcd"[sequence.num_prompt_tokens - 2] + str(sequence.index))(sequence))
    response = complete(worker, prompt=["x", "xy", "xyz"], n=2, stream=stream, echo=True)
    choices = choices_of(events(response) if stream else [response.json()])
    assert [choices[i][0] for i in range(6)] == ["xb0", "xb1", "xyc0", "xyc1", "xyzd0", "xyzd1"]


SENTENCEPIECE = toys.byte_fallback()
ROME = SENTENCEPIECE.token_to_id("▁Paris")


def speaks_sentencepiece():
    return FakeWorker(lambda sequence: [ROME, ROME, EOS], files=toys.files(SENTENCEPIECE))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "a"}, " Paris Paris"),
        ({"prompt": [ROME]}, " Paris Paris"),
        ({"prompt": "a", "echo": True}, "a Paris Paris"),
        ({"prompt": [ROME], "echo": True}, "Paris Paris Paris"),
    ],
)
def test_blanks_of_sentencepiece(body, text, stream):
    """The first token of an answer has its space, and the tokens of log probabilities join to the text."""
    response = complete(speaks_sentencepiece(), logprobs=0, stream=stream, **body)
    chunks = events(response) if stream else [response.json()]
    assert choices_of(chunks) == {0: (text, "stop")}
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["logprobs"]["tokens"]]
    assert "".join(tokens) == text + "</s>"
