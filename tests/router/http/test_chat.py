"""POST /v1/chat/completions through a router and a fake worker."""

import json

import pytest

from tests.fakes import tokenizer as toys
from tests.fakes.worker import FakeWorker, says
from tests.router.http.front import chat, choices_of, events, run_front


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


THINKS_AND_CALLS = (
    "<think>\nhm\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def knowing_tools():
    """Files of a model whose template shows tools."""
    files = toys.files(toys.byte_level())
    template = "{{ tools | tojson if tools }}" + toys.TEMPLATE
    return files | {"tokenizer_config.json": json.dumps({"chat_template": template}).encode()}


def thinking(**body):
    async def scenario(client, system):
        messages = [{"role": "user", "content": "a"}]
        return await client.post("/v1/chat/completions", json={"messages": messages, "tools": [TOOL], **body})

    return run_front(scenario, FakeWorker(says(THINKS_AND_CALLS), files=knowing_tools()), chat_format="qwen3")


def test_reasoning_and_a_tool_call_of_a_whole_answer():
    answer = thinking().json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"].strip()) == ("hm", "Let me see.")
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_streamed_tool_call_says_its_name_once():
    deltas = [choice["delta"] for chunk in events(thinking(stream=True)) for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"].get("name") for call in calls if "id" in call] == ["get_weather"]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Paris"}'
    assert {call["index"] for call in calls} == {0}


def call_tools(files=None, **body):
    """The response, and what the worker was asked for."""
    worker = FakeWorker(says(THINKS_AND_CALLS), files=files or knowing_tools())
    response = chat(worker, tools=[TOOL], **body)
    return response, worker.received[0].sampling.structured_output if worker.received else None


FORCED = [
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "get_weather"}}]}}},
    {"parallel_tool_calls": False},
]  # fmt: skip


@pytest.mark.parametrize("choice", FORCED)
def test_forced_calls(choice):
    async def scenario(client, system):
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], **choice}
        response = await client.post("/v1/chat/completions", json=body)
        return response.json()["choices"][0], system.workers[0].received[0].sampling.structured_output

    worker = FakeWorker(says(THINKS_AND_CALLS), files=knowing_tools())
    answer, held = run_front(scenario, worker, chat_format="qwen3")
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert "get_weather" in held.composite.grammar
    assert [json.loads(part.constraint.json_schema) for part in held.composite.parts] == [{"type": "object"}]


@pytest.mark.parametrize(
    ("files", "body", "param"),
    [
        (None, {"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        (None, {"tool_choice": "required"}, "tool_choice"),  # the format is not known
        (None, {"tool_choice": "required", "min_tokens": 1}, "min_tokens"),
        (toys.files(toys.byte_level()), {}, "tools"),  # the template does not know them
        (toys.files(toys.byte_level()), {"tool_choice": "required"}, "tools"),
    ],
)
def test_tools_that_cannot_be_called(files, body, param):
    response, _ = call_tools(files, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_no_tools_are_no_fault_of_a_template_that_knows_none():
    response, held = call_tools(toys.files(toys.byte_level()), tool_choice="none")
    assert response.status_code == 200
    assert not held.HasField("composite")


def test_a_model_without_a_template():
    worker = FakeWorker(says("b"), files=toys.files(toys.byte_level()) | {"tokenizer_config.json": b"{}"})
    error = chat(worker).json()["error"]
    assert (error["code"], error["param"]) == ("failed_precondition", "model")
    assert "Generate" not in error["message"]


def test_a_template_argument_at_fault_is_named_as_the_client_wrote_it():
    template = toys.TEMPLATE + "{{ n + 1 if n is defined }}"
    files = toys.files(toys.byte_level()) | {"tokenizer_config.json": json.dumps({"chat_template": template}).encode()}
    response = chat(FakeWorker(says("b"), files=files), chat_template_kwargs={"n": "one", "m": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs.n")
