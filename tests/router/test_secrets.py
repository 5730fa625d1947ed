"""What clients say, and their keys, stay out of the router's log at every level, whatever becomes of the request."""

import json
import logging

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct

from fissile.v1 import (
    ChatMessage,
    ChatRequest,
    ChatRole,
    DetokenizeRequest,
    GenerateRequest,
    GenerationOptions,
    SamplingParams,
    StructuredOutput,
    TokenizeRequest,
    Tool,
)
from router.answering.completion import Completion
from router.http.completions import CompletionWriter
from router.model.tokenizer import Tokenizer
from tests.fakes import tokenizer as toys
from tests.fakes.system import collect
from tests.fakes.worker import FakeWorker, says
from tests.router.http.front import run_front

MARK = "xyzzy"
"""In everything that is a client's."""
KEY = f"key-{MARK}-key-{MARK}"


@pytest.fixture(autouse=True)
def everything_is_logged(caplog):
    with caplog.at_level(logging.DEBUG):
        yield


@pytest.fixture
def logged(caplog, capfd):
    """All of the log, with tracebacks, and what came to standard output and error."""

    def text() -> str:
        formatter = logging.Formatter("%(message)s %(args)s")
        return "\n".join([formatter.format(record) for record in caplog.records] + list(capfd.readouterr()))

    return text


def chat_files():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ raise_exception(messages[0].content) if boom }}"
    return toys.files(toys.byte_level(), template=template)


def said(role=ChatRole.CHAT_ROLE_USER, **fields) -> ChatMessage:
    return ChatMessage(role=role, content=MARK, **fields)


def options(**fields) -> GenerationOptions:
    return GenerationOptions(stop=[MARK + "!"], bad_words=[MARK + "?"], cache_salt=MARK.encode(), **fields)


def boom() -> Struct:
    arguments = Struct()
    arguments.update({"boom": MARK})
    return arguments


def constrained(**constraint) -> GenerationOptions:
    return options(sampling=SamplingParams(structured_output=StructuredOutput(**constraint)))


def requests() -> list:
    """Good ones, and ones that are refused for many reasons."""
    return [
        GenerateRequest(text=MARK, options=options()),
        GenerateRequest(text=MARK * 100_000, options=options()),
        GenerateRequest(text=MARK, options=options(max_tokens=0, n=999, stop_token_ids=[10**9])),
        GenerateRequest(text=MARK, options=constrained(regex=f"({MARK}")),
        GenerateRequest(text=MARK, options=constrained(json_schema=json.dumps({"type": MARK}))),
        GenerateRequest(text=MARK, options=constrained(grammar=f"start: {MARK}")),
        GenerateRequest(),
        ChatRequest(messages=[said()], options=options()),
        ChatRequest(messages=[said(role=ChatRole.CHAT_ROLE_UNSPECIFIED)]),
        ChatRequest(messages=[said()], template_arguments=boom()),
        ChatRequest(messages=[said()], chat_template="{{ " + MARK),
        ChatRequest(messages=[said()], tools=[Tool(name=MARK, parameters=f'{{"{MARK}"')]),
        TokenizeRequest(text=MARK * 1_000_000),
        DetokenizeRequest(token_ids=[10**9]),
    ]


BODIES = [
    ("/v1/completions", {"prompt": MARK, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": MARK, "stream": True, "stop": MARK}),
    ("/v1/completions", {"prompt": {MARK: MARK}, MARK: 1, "logit_bias": {MARK: 1}}),
    ("/v1/completions", {"prompt": MARK, "top_p": MARK, "response_format": {"type": MARK}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}]}),
    ("/v1/chat/completions", {"messages": [{"role": MARK, "content": {MARK: MARK}}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}], "chat_template_kwargs": {"boom": MARK}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}], "chat_template_kwargs": {"a": 10**400}}),
    ("/v1/models/" + "x", None),
]


async def ask(system, request) -> str:
    """The status of a call with the key, and of one with a key that is not known."""
    name = type(request).__name__.removesuffix("Request")
    method = getattr(system.stub, name)
    for key in (KEY + MARK, KEY):
        call = method(request, metadata=(("authorization", f"Bearer {key}"),))
        try:
            await (collect(call) if name in ("Generate", "Chat") else call)
            status = "OK"
        except grpc.aio.AioRpcError as error:
            status = error.code().name
    return status


async def post(client, path: str, body: dict | None) -> int:
    for key in (KEY + MARK, KEY):
        headers = {"authorization": f"Bearer {key}"}
        answer = await client.request("GET" if body is None else "POST", path, json=body, headers=headers)
    return answer.status_code


def answering_worker() -> FakeWorker:
    return FakeWorker(says(f" {MARK} {MARK}"), files=chat_files())


def test_requests_of_every_kind(logged):
    async def scenario(client, system):
        statuses = [await ask(system, request) for request in requests()]
        codes = [await post(client, path, body) for path, body in BODIES]
        bytes_call = system.channel.unary_stream("/fissile.v1.GenerationService/Generate")
        not_text = GenerateRequest(text=MARK * 2).SerializeToString().replace(MARK.encode(), b"\xff" * len(MARK), 1)
        for raw in (b"\xff" + MARK.encode(), not_text):
            with pytest.raises(grpc.aio.AioRpcError):
                await bytes_call(raw, metadata=(("authorization", f"Bearer {KEY}"),)).read()
        await client.post("/v1/completions", content=MARK.encode(), headers={"authorization": f"Bearer {KEY}"})
        return statuses, codes

    statuses, codes = run_front(scenario, answering_worker(), api_key=KEY)
    assert {"OK", "INVALID_ARGUMENT"} <= set(statuses) and {200, 400, 404} <= set(codes)
    text = logged()
    assert "request" in text and "refused" in text
    assert MARK not in text


class Broken(Exception):
    """A fault of ours that quotes what a client said."""


def broken(*_args, **_kwargs):
    try:
        raise KeyError(MARK)
    except KeyError as error:
        raise Broken(MARK) from error


@pytest.mark.parametrize(
    ("place", "name"),
    [(Tokenizer, "encode"), (Completion, "accept"), (CompletionWriter, "chunks"), (CompletionWriter, "whole")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_faults_of_ours_are_logged_with_their_place_and_not_their_words(place, name, logged, monkeypatch):
    async def scenario(client, system):
        monkeypatch.setattr(place, name, broken)
        await ask(system, GenerateRequest(text=MARK))
        return [await post(client, "/v1/completions", {"prompt": MARK, "stream": stream}) for stream in (True, False)]

    run_front(scenario, answering_worker(), api_key=KEY)
    text = logged()
    assert "in broken" in text and "Broken" in text and "KeyError" in text
    assert MARK not in text
