"""The front as a server: models, health, keys, silence, clients that go, shutdown, TLS."""

import asyncio
import json
import logging
import ssl
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
from router.server import RouterServer, http_server
from tests.fakes.certificates import Authority
from tests.fakes.system import until
from tests.fakes.worker import FakeWorker, counts, says
from tests.router.http.front import run_front

STREAM = {"prompt": "a", "stream": True, "max_tokens": 1000}


def get(path, *workers, headers=None, **settings):
    async def scenario(client, system):
        return await client.get(path, headers=headers)

    return run_front(scenario, *(workers or [FakeWorker(says("b"))]), **settings)


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


PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def options(path="/v1/chat/completions", headers=PREFLIGHT, **settings):
    async def scenario(client, system):
        return await client.options(path, headers=headers)

    return run_front(scenario, FakeWorker(says("b")), **settings)


@pytest.mark.parametrize("allowed", [[PAGE], ["https://other.example", PAGE], ["*"]])
def test_a_browser_may_ask_from_an_allowed_page_and_shows_no_key_when_it_asks_whether(allowed):
    answer = options(http_allowed_origins=allowed, api_key="secret")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]


def test_a_page_reads_answers_and_errors_alike():
    """Without the header a browser hides even the error from its page."""

    async def scenario(client, system):
        asked = [
            await client.post("/v1/completions", json={"prompt": "a"}, headers={"origin": PAGE, **key})
            for key in ({"authorization": "Bearer secret"}, {})
        ]
        return [(answer.status_code, answer.headers.get("access-control-allow-origin")) for answer in asked]

    settings = {"http_allowed_origins": [PAGE], "api_key": "secret"}
    assert run_front(scenario, FakeWorker(says("b")), **settings) == [(200, PAGE), (401, PAGE)]


def test_other_pages_and_a_front_without_the_setting_allow_nothing():
    assert "access-control-allow-origin" not in options(http_allowed_origins=["https://other.example"]).headers
    assert options().status_code == 405
    assert "access-control-allow-origin" not in get("/v1/models", headers={"origin": PAGE}).headers


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://a b", "ftp://a"])
def test_an_origin_that_no_browser_sends_is_refused_at_start(origin):
    with pytest.raises(ValueError, match=r"must be http\(s\)://host\[:port\] or \*"):
        RouterSettings(http_allowed_origins=[origin])


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


def test_https_with_the_routers_certificate_also_a_renewed_one(tmp_path, monkeypatch):
    monkeypatch.setattr("router.http.server.RENEW_SECONDS", 0.01)
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    certificate, key = authority.issue()

    async def is_served(system, ca):
        url = f"https://127.0.0.1:{system.router.http_port}/health"
        async with httpx2.AsyncClient(verify=ssl.create_default_context(cafile=ca.certificate)) as secure:
            try:
                return (await secure.get(url)).status_code == 200
            except httpx2.ConnectError:
                return False

    async def scenario(client, system):
        before = [await is_served(system, ca) for ca in (authority, other)]
        for file, new in zip((certificate, key), other.issue(), strict=True):
            file.write_bytes(new.read_bytes())
        while not await is_served(system, other):
            await asyncio.sleep(0.01)
        return before, await is_served(system, authority)

    tls = {"tls_certificate": certificate, "tls_key": key, "tls": authority.client()}
    assert run_front(scenario, FakeWorker(says("b")), **tls) == ([True, False], False)


def test_https_with_certificates_of_clients(tmp_path):
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue()

    async def scenario(client, system):
        url = f"https://127.0.0.1:{system.router.http_port}/health"
        known = ssl.create_default_context(cafile=authority.certificate)
        known.load_cert_chain(*authority.issue("client"))
        async with httpx2.AsyncClient(verify=known) as secure:
            status = (await secure.get(url)).status_code
        unknown = ssl.create_default_context(cafile=authority.certificate)
        async with httpx2.AsyncClient(verify=unknown) as secure:
            with pytest.raises((httpx2.ReadError, httpx2.RemoteProtocolError)):
                await secure.get(url)
        return status

    tls = {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": authority.certificate}
    tls["tls"] = authority.client(with_certificate=True)
    assert run_front(scenario, FakeWorker(says("b")), **tls) == 200


@pytest.mark.parametrize(
    "garbage",
    [
        bytes(range(256)) * 16,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
        b"GET /" + b"a" * 100_000,
    ],
    ids=["bytes", "length", "half a body", "endless line"],
)
def test_garbage_on_the_port(garbage):
    async def scenario(client, system):
        _, writer = await asyncio.open_connection("127.0.0.1", system.router.http_port)
        writer.write(garbage)
        await writer.drain()
        writer.close()
        await system.quiet()
        return (await client.post("/v1/completions", json={"prompt": "a"})).status_code

    assert run_front(scenario, FakeWorker(says("b"))) == 200


CHUNKS = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
TOO_LONG = b"%x\r\n%s\r\n" % (9_000_000, b" " * 9_000_000)


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"GET /\r\n\r\n", 400), (CHUNKS + b"zz\r\n{}\r\n", 400), (CHUNKS + TOO_LONG + b"zz\r\n", 413)],
    ids=["no version", "no size of a chunk", "after its answer"],
)
def test_what_is_no_http_gets_one_error_and_is_logged_quietly(sent, status, caplog):
    async def scenario(client, system):
        reader, writer = await asyncio.open_connection("127.0.0.1", system.router.http_port)
        writer.write(sent)
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return received

    with caplog.at_level(logging.INFO):
        head, _, body = run_front(scenario, FakeWorker(says("b")), max_prompt_bytes=1000).partition(b"\r\n\r\n")
    assert (int(head.split()[1]), set(json.loads(body))) == (status, {"error"})
    assert [record.levelname for record in caplog.records if "is ended" in record.message] == ["INFO"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info]


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_a_wish_for_another_protocol_is_served_in_this_one(protocol, caplog):
    """curl --http2 says so with every request."""
    headers = {"connection": "upgrade", "upgrade": protocol}
    assert get("/v1/models", FakeWorker(says("b")), headers=headers).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_taken_port():
    async def scenario(client, system):
        router = RouterServer(RouterSettings(port=0, http_port=system.router.http_port))
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{system.router.http_port} for HTTP"):
            await router.start()
        await router.stop()

    run_front(scenario, FakeWorker(says("b")))


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
