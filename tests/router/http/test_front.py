"""The front as a server: models, health, keys, silence, clients that go, shutdown."""

import asyncio
import json
import subprocess
import sys
from contextlib import suppress

import httpx2
import pytest

import router.http
from fissile.errors import UnavailableError
from router.callers.callers import Callers
from router.config import RouterSettings
from router.http.app import AppConfig, build_app
from router.http.middleware import BodyBounds
from router.server import http_server
from tests.fakes.system import until
from tests.fakes.worker import FakeWorker, counts, says
from tests.router.http.front import get, run_front

STREAM = {"prompt": "a", "stream": True, "max_tokens": 1000}


def test_models():
    answer = get("/v1/models", FakeWorker(says("b"), model="owner/b"), FakeWorker(says("b"), model="a")).json()
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["a", "owner/b"]
    assert answer["data"][0].pop("created") > 1.7e9
    assert answer["data"][0] == {
        "id": "a",
        "object": "model",
        "owned_by": "fissile",
        "root": "a",
        "max_model_len": 1024,
    }


def test_one_model():
    assert get("/v1/models/owner/b", FakeWorker(says("b"), model="owner/b")).json()["id"] == "owner/b"
    assert get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_a_request_that_names_no_model_gets_the_only_one():
    async def scenario(client, system):
        return await client.post("/v1/completions", json={"prompt": "a"})

    assert run_front(scenario, FakeWorker(says("b"))).json()["model"] == "toy"


def test_health_is_that_of_the_next_request():
    worker = FakeWorker(says("b"))

    async def scenario(client, system):
        before = (await client.get("/health")).status_code
        await worker.kill()
        await until(lambda: not system.router.parts.workers.is_ready)
        return before, (await client.get("/health")).status_code

    assert run_front(scenario, worker) == (200, 503)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer secret", 200),
        ("Bearer Secret", 401),
        ("secret", 401),
        ("Bearer x", 401),
        ("Bearer sécret", 401),
        (None, 401),
    ],
)
def test_a_key(header, status):
    headers = {} if header is None else {"authorization": header.encode()}
    response = get("/v1/models", headers=headers, api_key="secret")
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_health_needs_no_key():
    assert get("/health", api_key="secret").status_code == 200


def test_without_a_key_any_is_fine():
    assert get("/v1/models", headers={"authorization": "Bearer whatever"}).status_code == 200


def test_a_silent_stream_is_kept_alive():
    """Before the first token, too."""
    worker = FakeWorker(says("b"), step_seconds=0.5)

    async def scenario(client, system):
        app = build_app(
            system.router.parts.api,
            lambda: True,
            AppConfig(BodyBounds(1000, system.router.parts.admission.held_bytes, 5.0), keep_alive=0.05),
        )
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://front") as inside:
            return (await inside.post("/v1/completions", json=STREAM)).text

    text = run_front(scenario, worker)
    assert text.startswith(": keep-alive\n\n")
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request_at_the_worker(stream, caplog):
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(client, system):
        asking = asyncio.create_task(client.post("/v1/completions", json={**STREAM, "stream": stream}))
        await until(lambda: worker.num_emitted > 3)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        await system.quiet()
        return dict(system.router.parts.metrics.finished)

    assert run_front(scenario, worker) == {"cancelled": 1}
    assert worker.aborted == [worker.received[0].id]
    assert worker.num_emitted < 100
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")], "that is no fault"


def test_a_client_that_reads_nothing_and_goes_leaves_nothing():
    """The front waits for the socket when the client goes."""
    worker = FakeWorker(counts(20_000), step_seconds=0, tokens_per_step=4, max_model_len=30_000)
    body = json.dumps({**STREAM, "max_tokens": 20_000, "logprobs": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def scenario(client, system):
        _, writer = await asyncio.open_connection("127.0.0.1", system.router.http_port, limit=1024)
        writer.write(head + body)
        await until(lambda: worker.num_emitted > 15_000)
        writer.transport.abort()
        await system.quiet()

    run_front(scenario, worker)


def test_requests_are_counted_with_those_of_grpc():
    async def scenario(client, system):
        await client.post("/v1/completions", json={"prompt": "a"})
        await client.post("/v1/completions", json={"prompt": "a", "top_p": 2})
        return dict(system.router.parts.metrics.finished)

    assert run_front(scenario, FakeWorker(says("b"))) == {"eos": 1, "invalid_argument": 1}


def test_open_streams_finish_at_shutdown_and_new_requests_are_refused():
    worker = FakeWorker(counts(60), step_seconds=0.01)

    async def scenario(client, system):
        async with client.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.aiter_lines()
            await anext(lines)
            stopping = asyncio.create_task(system.router.stop())
            await until(lambda: not system.router.is_ready)
            refused = await client.post("/v1/completions", json={"prompt": "a"})
            health = await client.get("/health")
            rest = [line async for line in lines]
        await stopping
        with pytest.raises(httpx2.ConnectError):
            await client.get("/health")
        return refused.status_code, health.status_code, rest

    refused, health, rest = run_front(scenario, worker)
    assert (refused, health) == (503, 503)
    assert "data: [DONE]" in rest


def test_what_does_not_finish_in_time_ends_with_an_error():
    async def scenario(client, system):
        async with client.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await system.router.stop()
            return [line async for line in lines if line]

    last = run_front(scenario, FakeWorker(counts(1000), step_seconds=0.02), drain_timeout=0.2)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"


def test_without_its_packages_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(router, "http", router.http)  # the import below puts another there
    for name in [name for name in sys.modules if name.startswith("router.http")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("starlette.applications", "starlette.requests", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnavailableError, match=r"http-port needs starlette\..*: pip install 'fissile\[http\]'"):
        http_server(RouterSettings(http_port=0), None, Callers(), lambda: True)


def test_a_router_without_a_front_imports_none_of_it():
    code = "import sys, router.server; print([m for m in ('starlette', 'uvicorn') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"
