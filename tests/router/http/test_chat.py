"""POST /v1/chat/completions through a router and a fake worker."""

import pytest

from tests.fakes.worker import FakeWorker, says
from tests.router.http.front import chat, choices_of, events


def test_a_whole_answer():
    response = chat(FakeWorker(says("bc")))
    answer = response.json()
    assert answer.pop("id") == response.headers["x-request-id"]
    assert answer.pop("created") > 1.7e9
    assert answer.pop("usage")["completion_tokens"] == 3
    assert answer == {
        "object": "chat.completion",
        "model": "toy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "bc", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
    }


def test_a_stream_says_once_whose_message_it_is():
    chunks = events(chat(FakeWorker(says("bcd")), stream=True, n=2))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert choices_of(chunks) == {0: ("bcd", "stop"), 1: ("bcd", "stop")}
    roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
    assert sorted(roles) == [0, 1]


def test_usage_in_a_stream_comes_last_and_alone():
    *chunks, last = events(chat(FakeWorker(says("bc")), stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], last["usage"]["prompt_tokens"] + 3)


def test_the_conversation_reaches_the_template():
    def prompt_length(**body):
        worker = FakeWorker(says("b"))
        assert chat(worker, **body).status_code == 200
        return worker.received[0].num_prompt_tokens

    long = [{"role": "system", "content": "b"}, {"role": "user", "content": "cd"}]
    assert prompt_length(messages=long) > prompt_length(messages=long[:1])


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(stream):
    response = chat(FakeWorker(says("b")), logprobs=True, top_logprobs=1, stream=stream)
    parts = events(response) if stream else [response.json()]
    content = [token for part in parts for token in part["choices"][0]["logprobs"]["content"]]
    assert [token["token"] for token in content] == ["b", "<|im_end|>"]
    assert content[0]["bytes"] == [98]
    assert [token["logprob"] for token in content] == [-2.5, -2.5]
    assert [[top["logprob"] for top in token["top_logprobs"]] for token in content] == [[-0.5], [-0.5]]


def test_logprobs_of_the_chosen_tokens_alone():
    logprobs = chat(FakeWorker(says("b")), logprobs=True).json()["choices"][0]["logprobs"]
    assert [token["top_logprobs"] for token in logprobs["content"]] == [[], []]
