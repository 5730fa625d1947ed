"""What comes to the port: TLS, what is no HTTP, other protocols; a port that is taken."""

import asyncio
import json
import logging
import ssl

import httpx2
import pytest

from router.config import RouterSettings
from router.server import RouterServer
from tests.fakes.certificates import Authority
from tests.fakes.worker import FakeWorker, says
from tests.router.http.front import get, run_front


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
