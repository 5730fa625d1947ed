"""Errors in OpenAI's form: status, type, the field at fault; before a response, in the midst of it."""

import json
import math

import pytest

from fissile.errors import (
    MAX_MESSAGE_BYTES,
    AlreadyExistsError,
    DeadlineExceededError,
    FissileError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from fissile.v1 import FinishReason, RequestOutput
from router.http.errors import error_object, headers_of, status_of
from router.server import request_limit
from tests.fakes.worker import FakeWorker, counts, says
from tests.router.http.front import chat, complete, run_front


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidArgumentError.of("top_p", "is 2"), 400, "invalid_request_error", "top_p", "invalid_argument"),
        (UnimplementedError("x"), 400, "invalid_request_error", None, "unimplemented"),
        (UnauthenticatedError("x"), 401, "invalid_request_error", None, "unauthenticated"),
        (PermissionDeniedError("x"), 403, "invalid_request_error", None, "permission_denied"),
        (NotFoundError("x"), 404, "invalid_request_error", "model", "model_not_found"),
        (AlreadyExistsError("x"), 409, "invalid_request_error", None, "already_exists"),
        (ResourceExhaustedError("x"), 429, "rate_limit_error", None, "rate_limit_exceeded"),
        (UnavailableError("x"), 503, "server_error", None, "unavailable"),
        (DeadlineExceededError("x"), 504, "server_error", None, "deadline_exceeded"),
        (InternalError("x"), 500, "server_error", None, "internal"),
        (FissileError("x"), 500, "server_error", None, "internal"),
    ],
)
def test_each_error(error, status, kind, param, code):
    assert status_of(error) == status
    assert error_object(error) == {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def test_when_to_try_again_is_in_whole_seconds():
    assert headers_of(UnavailableError("x", retry_after=1.2)) == {"retry-after": str(math.ceil(1.2))}
    assert headers_of(UnavailableError("x")) == {}


@pytest.mark.parametrize(
    ("send", "fields", "param"),
    [
        (complete, {"top_p": 2}, "top_p"),
        (complete, {"max_tokens": 0}, "max_tokens"),
        (complete, {"prompt": ""}, "prompt"),
        (complete, {"prompt": [[]]}, "prompt"),
        (complete, {"prompt": [999_999]}, "prompt"),
        (complete, {"prompt": [999_999], "echo": True}, "prompt"),
        (complete, {"prompt": "", "echo": True, "logprobs": 1}, "prompt"),
        (complete, {"logit_bias": {"999999": 1}}, "logit_bias"),
        (complete, {"temperature": 1e300}, "temperature"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (chat, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (chat, {"chat_template": "x"}, "chat_template"),
        (chat, {"chat_template_kwargs": {"n": 10**400}}, "chat_template_kwargs"),
        (chat, {"nonsense": 1}, "nonsense"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_named_as_the_client_wrote_it(send, fields, param, stream):
    response = send(FakeWorker(says("b")), stream=stream, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param in error["message"]


def test_messages_are_short_whatever_the_client_says():
    async def scenario(client, system):
        name = "x" * 50_000
        body = {"model": name, "prompt": "a"}
        return [await client.post("/v1/completions", json=body), await client.get(f"/v1/{name}")]

    responses = run_front(scenario, FakeWorker(says("b")))
    assert [response.status_code for response in responses] == [404, 404]
    assert [len(response.json()["error"]["message"]) for response in responses] == [MAX_MESSAGE_BYTES + 1] * 2


def test_all_faults_are_in_the_message():
    error = complete(FakeWorker(says("b")), top_p=2, temperature=-1).json()["error"]
    assert "top_p: " in error["message"] and "temperature: " in error["message"]
    assert "options" not in error["message"]


def test_a_prompt_that_is_too_long():
    error = complete(FakeWorker(says("b")), prompt="x" * 2000).json()["error"]
    assert error["param"] == "prompt"
    assert "1024" in error["message"]


def test_an_unknown_model():
    response = complete(FakeWorker(says("b")), model="gpt-5")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_a_router_without_workers_says_when_to_come_again():
    async def scenario(client, system):
        return await client.post("/v1/completions", json={"prompt": "a"})

    response = run_front(scenario, wait_ready=False, workers=["127.0.0.1:1"], worker_wait=0.1)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_a_full_router_says_when_to_come_again():
    async def scenario(client, system):
        async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}):
            return await client.post("/v1/completions", json={"prompt": "a"})

    response = run_front(scenario, FakeWorker(counts(1000), step_seconds=0.02), max_open_requests=1)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"] == "rate_limit_error"


def post_raw(content, path="/v1/completions"):
    async def scenario(client, system):
        response = await client.post(path, content=content)
        again = await client.post(path, json={"prompt": "a"})
        assert again.status_code == 200
        return response

    return run_front(scenario, FakeWorker(says("b")), max_prompt_bytes=1000)


@pytest.mark.parametrize(
    ("content", "param"),
    [(b"{", None), (b"[]", None), (b"\xff", None), (rb'{"prompt": "\ud800"}', "prompt")],
)
def test_bodies_that_are_none(content, param):
    response = post_raw(content)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_body_that_is_too_long():
    limit = request_limit(1000)
    assert post_raw(b" " * limit).status_code == 400
    response = post_raw(b" " * (limit + 1))
    assert response.status_code == 413
    assert str(limit) in response.json()["error"]["message"]


def test_a_body_that_is_too_long_and_does_not_say_so():
    async def endless():
        for _ in range(100):
            yield b" " * 100_000

    assert post_raw(endless()).status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/x", 404),
    ],
)
def test_paths_that_are_none(method, path, status):
    async def scenario(client, system):
        return await client.request(method, path)

    response = run_front(scenario, FakeWorker(says("b")))
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_path_that_is_none_names_those_that_are():
    async def scenario(client, system):
        return await client.post("/chat/completions", json={})

    assert run_front(scenario, FakeWorker(says("b"))).json()["error"]["message"] == (
        "POST /chat/completions: Not Found; there are /v1/completions, /v1/chat/completions, /v1/models, /health"
    )


REFUSAL = RequestOutput(
    finish_reason=FinishReason.FINISH_REASON_ERROR,
    error_code=3,
    field="sampling.structured_output.regex",
    detail="bad: (",
)


def test_what_the_worker_refuses():
    response = complete(FakeWorker(says("b"), refuse=REFUSAL), structured_outputs={"regex": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs.regex")


def test_an_error_in_the_midst_is_the_last_event():
    """The client must see that the answer is not whole."""
    worker = FakeWorker(counts(1000), mute_after=5)

    async def scenario(client, system):
        async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            lines = response.aiter_lines()
            first = await anext(lines)
            await worker.kill()
            return response.status_code, [first, *[line async for line in lines if line]]

    status, lines = run_front(scenario, worker, worker_wait=0.1)
    assert status == 200
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "unavailable")


def test_a_fault_of_ours_tells_no_secrets(monkeypatch, caplog):
    async def scenario(client, system):
        monkeypatch.setattr(system.router.parts.api, "list_models", None)
        return await client.get("/v1/models")

    response = run_front(scenario, FakeWorker(says("b")))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error; the server's log has the details"
    assert "in all" in caplog.text and "TypeError" in caplog.text
