"""OpenAI's own client, unmodified, against the HTTP front of a running service."""

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MODEL = "smollm2"
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.fixture
def api(cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.http_address}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def test_models(api):
    (model,) = api.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "fissile")
    assert api.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt-5")


def test_a_completion(api):
    answer = api.completions.create(prompt=PROMPT, max_tokens=4, **GREEDY)
    (choice,) = answer.choices
    assert " Paris" in choice.text and choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 4, 9)
    assert answer.id == answer._request_id


def test_a_streamed_completion_is_the_same(api):
    whole = api.completions.create(prompt=PROMPT, max_tokens=12, **GREEDY)
    chunks = list(
        api.completions.create(
            prompt=PROMPT, max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 12


def test_several_prompts_with_several_choices_each(api):
    prompts = [PROMPT, "1, 2, 3,"]
    alone = [api.completions.create(prompt=prompt, max_tokens=4, **GREEDY).choices[0].text for prompt in prompts]
    answer = api.completions.create(prompt=prompts, n=2, max_tokens=4, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer.usage.completion_tokens == 16


def test_token_ids_as_prompt_and_a_seed(api):
    first, second = (
        api.completions.create(model=MODEL, prompt=[504, 3575, 282], max_tokens=8, seed=7).choices[0].text
        for _ in range(2)
    )
    assert first == second != ""


def test_stop(api):
    answer = api.completions.create(prompt="1, 2, 3,", stop=[" 6"], max_tokens=40, **GREEDY)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.endswith(" 5,")


def test_logprobs_of_a_completion_with_its_prompt(api):
    (choice,) = api.completions.create(prompt=PROMPT, max_tokens=2, logprobs=3, echo=True, **GREEDY).choices
    logprobs = choice.logprobs
    assert choice.text.startswith(PROMPT + " Paris")
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs[0] is None and all(-30 < value <= 0 for value in logprobs.token_logprobs[1:])
    for position, token in enumerate(logprobs.tokens):
        assert choice.text[logprobs.text_offset[position] :].startswith(token)
    # Greedy: what was chosen is the most likely token.
    last = logprobs.top_logprobs[-1]
    assert len(last) == 3 and max(last, key=last.get) == logprobs.tokens[-1]


def test_a_chat(api):
    answer = api.chat.completions.create(messages=QUESTION, max_completion_tokens=8, **GREEDY)
    message = answer.choices[0].message
    assert message.role == "assistant" and "Paris" in message.content and message.tool_calls is None
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_conversation_goes_on_with_the_answer_as_it_came(api):
    first = api.chat.completions.create(messages=QUESTION, max_tokens=8, **GREEDY).choices[0].message
    again = [*QUESTION, first.model_dump(), {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]}]
    assert api.chat.completions.create(messages=again, max_tokens=4, **GREEDY).choices[0].message.content


def test_a_streamed_chat_with_several_choices(api):
    stream = api.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, n=3, seed=1, stream=True)
    texts, ends = {}, {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    whole = api.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, n=3, seed=1)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert set(ends) == {0, 1, 2} and set(ends.values()) <= {"stop", "length"}


def test_the_clients_own_stream_helper(api):
    with api.chat.completions.stream(messages=QUESTION, max_tokens=12, **GREEDY) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text != ""


def test_logprobs_of_a_chat(api):
    answer = api.chat.completions.create(messages=QUESTION, max_tokens=3, logprobs=True, top_logprobs=2, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == 3
    for token in content:
        assert token.top_logprobs[0].token == token.token and len(token.top_logprobs) == 2
        assert bytes(token.bytes).decode() == token.token


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_a_call_and_its_result_may_stand_in_the_conversation(api):
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    assert api.chat.completions.create(messages=messages, max_tokens=4, **GREEDY).choices


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


def test_an_answer_that_follows_a_schema(api):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "big": {"type": "boolean"}},
        "required": ["name", "big"],
        "additionalProperties": False,
    }
    answer = api.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=1,
        seed=3,
        n=2,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}},
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)


def test_an_answer_parsed_by_the_client(api):
    answer = api.chat.completions.parse(messages=QUESTION, response_format=City, max_tokens=60, **GREEDY)
    assert isinstance(answer.choices[0].message.parsed, City)


def test_any_json_object(api):
    answer = api.chat.completions.create(
        messages=[{"role": "user", "content": "A JSON object with one key, please."}],
        response_format={"type": "json_object"},
        max_tokens=15,
        **GREEDY,
    )
    assert answer.choices[0].message.content.startswith("{")


def test_a_choice_of_ours(api):
    body = {"structured_outputs": {"choice": ["yes", "no"]}, "top_k": 5}
    answer = api.chat.completions.create(messages=QUESTION, extra_body=body, **GREEDY)
    assert answer.choices[0].message.content in ("yes", "no")


def test_sampling_parameters(api):
    options = {"logit_bias": {"260": -100}, "presence_penalty": 1, "frequency_penalty": 0.5, "top_p": 0.9}
    answer = api.completions.create(model=MODEL, prompt=PROMPT, seed=1, user="me", max_tokens=8, **options)
    assert answer.usage.completion_tokens <= 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 2.0}, "top_p"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        # SmolLM2's template shows none; `compat/` has one that does.
        ({"tools": [TOOL]}, "tools"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields_are_named(api, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        api.chat.completions.create(**{"model": MODEL, "messages": QUESTION, "stream": stream, **fields})
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


def test_an_unknown_model(api):
    with pytest.raises(openai.NotFoundError) as raised:
        api.chat.completions.create(model="gpt-5", messages=QUESTION)
    assert raised.value.code == "model_not_found"


def test_a_key_that_is_wrong(cluster, services, tmp_path):
    port_file = tmp_path / "http"
    workers = ",".join(cluster.workers.values())
    arguments = ("--http-port", "0", "--http-port-file", str(port_file), "--api-key", "right")
    services.start("guarded", "router", "--workers", workers, *arguments)
    url = f"http://127.0.0.1:{port_file.read_text().strip()}/v1"
    with OpenAI(base_url=url, api_key="right") as client:
        assert client.models.list().data
    with OpenAI(base_url=url, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_client_that_goes_frees_the_worker(api, endpoint, idle):
    long = {"model": MODEL, "max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
    if endpoint == "chat":
        stream = api.chat.completions.create(messages=QUESTION, **long)
    else:
        stream = api.completions.create(prompt=PROMPT, **long)
    next(iter(stream))
    stream.close()
    idle()


def test_many_at_once_from_an_asynchronous_client(cluster, idle):
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{cluster.http_address}/v1", api_key="any", max_retries=0) as client:

            async def one(number: int) -> str:
                if number % 2:
                    answer = await client.completions.create(prompt=PROMPT, max_tokens=4, **GREEDY)
                    return answer.choices[0].text
                stream = await client.completions.create(prompt=PROMPT, max_tokens=4, stream=True, **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(16)))

    assert len(set(asyncio.run(ask()))) == 1
    idle()
