"""One line in the log for each request, whatever becomes of it, through gRPC and HTTP alike."""

import logging
import re

import pytest

from common.faults import shown
from fissile.v1 import ChatRequest, GenerateRequest, Prompt
from tests.fakes.system import collect, error_of, run_system
from tests.fakes.worker import FakeWorker, counts, says
from tests.router.http.front import run_front


def lines(caplog):
    return [record for record in caplog.records if record.name == "router.account"]


@pytest.fixture(autouse=True)
def at_info(caplog):
    with caplog.at_level(logging.INFO):
        yield


def test_a_request_that_was_served(caplog):
    worker = FakeWorker(counts(5))

    async def scenario(system):
        await system.ask(GenerateRequest(request_id="mine", text="a"))

    run_system(scenario, worker)
    (line,) = lines(caplog)
    said = f"request mine from 127.0.0.1: model toy, worker {worker.address}, 2 tokens in, 4 cached, 5 out, TTFT "
    assert line.getMessage().startswith(said)
    assert re.fullmatch(r"[\d.]+ ms, total [\d.]+ ms, length", line.getMessage().removeprefix(said))
    assert (line.request_id, line.caller, line.model) == ("mine", "127.0.0.1", "toy")
    assert (line.worker, line.end) == (worker.address, "length")
    assert (line.num_prompt_tokens, line.num_cached_tokens, line.num_completion_tokens) == (2, 4, 5)
    assert 0 < line.ttft_seconds <= line.e2e_seconds < 20


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            GenerateRequest(request_id="x", text=""),
            r"request x from 127.0.0.1: model toy, worker -, 0 tokens in, 0 cached, 0 out, TTFT -, total [\d.]+ ms, "
            "invalid_argument",
        ),
        (
            GenerateRequest(text="a", model="other"),
            r"request [0-9a-f]{32} from 127.0.0.1: model other, worker -, .*, not_found",
        ),
        (
            GenerateRequest(text="a", model="\n" * 500),
            r"request \w+ from [\d.]+: model '(\\n){128}\\u2026', .*, not_found",
        ),
        (GenerateRequest(request_id="a\nb", text="a"), r"request 'a\\nb' from .*, invalid_argument"),
        (ChatRequest(), r"request .*, invalid_argument"),
    ],
)
def test_a_request_that_was_refused(request_, said, caplog):
    async def scenario(system):
        method = system.stub.Chat if isinstance(request_, ChatRequest) else system.stub.Generate
        await error_of(collect(method(request_)))

    run_system(scenario, FakeWorker(says("b")))
    (line,) = lines(caplog)
    assert re.fullmatch(said, line.getMessage())


def test_a_client_that_goes(caplog):
    async def scenario(system):
        call = system.stub.Generate(GenerateRequest(text="a"))
        await call.read()
        call.cancel()
        await system.quiet()

    run_system(scenario, FakeWorker(counts(1000), step_seconds=0.01))
    (line,) = lines(caplog)
    assert line.end == "cancelled" and line.num_completion_tokens > 0


def test_several_prompts_are_one_request(caplog):
    async def scenario(system):
        await system.ask(GenerateRequest(prompts=[Prompt(text="a"), Prompt(text="b c")]))

    run_system(scenario, *(FakeWorker(counts(3)) for _ in range(2)))
    (line,) = lines(caplog)
    assert len(line.worker.split()) == 2
    assert line.num_completion_tokens == 6


def test_http_alike(caplog):
    async def scenario(client, system):
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        await client.post("/v1/completions", json={"prompt": "a", "model": "other"})
        return answer.json()["id"]

    request_id = run_front(scenario, FakeWorker(says("b")))
    served, refused = lines(caplog)
    assert (served.request_id, served.end) == (request_id, "eos")
    assert (refused.model, refused.end) == ("other", "not_found")


def test_a_body_that_is_no_request_has_a_line_too(caplog):
    async def scenario(client, system):
        await client.post("/v1/completions", content=b"{")
        await client.post("/v1/chat/completions", json={"messages": 5, "no\nsense": 1})

    run_front(scenario, FakeWorker(says("b")))
    assert not lines(caplog)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("router.http")]
    assert [line for line in said if "refused" in line] == [
        "POST /v1/completions refused: invalid_argument",
        "POST /v1/chat/completions refused: invalid_argument, messages, another field",
    ]


def test_a_clients_words_fit_in_a_line():
    assert [shown(text) for text in ("llama", "a\r\nb", "\x1b[31m", "x" * 200)] == [
        "llama", "'a\\r\\nb'", "'\\x1b[31m'", "x" * 128 + "…",
    ]  # fmt: skip


def test_bytes_that_are_no_request_have_a_line_too(caplog):
    async def scenario(system):
        await error_of(system.channel.unary_stream("/fissile.v1.GenerationService/Generate")(b"\xff").read())

    run_system(scenario, FakeWorker(says("b")))
    (said,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert said == (
        "/fissile.v1.GenerationService/Generate refused: the request is not a valid fissile.v1.GenerateRequest"
    )
