"""TLS and mutual TLS: who is let in, and what the others are told."""

import asyncio
import logging
from dataclasses import replace

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.server import ServiceServer
from fissile.channel import aio_channel
from fissile.errors import InvalidArgumentError, UnavailableError, from_rpc_error
from fissile.healthcheck import main as healthcheck
from fissile.tls import ServerTls
from tests.fakes.certificates import Authority

NAME = "fissile.v1.GenerationService"


@pytest.fixture
def ours(tmp_path):
    return Authority(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path):
    return Authority(tmp_path / "theirs")


def with_server(server_tls, scenario):
    """`scenario` gets a check: what the server's health is over a new connection with TLS of a client. It raises what a
    client library would."""

    async def run():
        service = ServiceServer(NAME, server_tls)
        port = await service.start("127.0.0.1", 0)
        await service.set_serving(True)

        async def check(client_tls):
            async with aio_channel(f"127.0.0.1:{port}", client_tls) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                try:
                    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status
                except Exception as error:
                    raise from_rpc_error(error) from None

        try:
            return await scenario(check)
        finally:
            await service.stop(0)

    return asyncio.run(run())


def status(server_tls, client_tls):
    return with_server(server_tls, lambda check: check(client_tls))


def test_a_client_that_trusts_the_authority_is_served(ours):
    assert status(ours.server(), ours.client()) == health_pb2.HealthCheckResponse.SERVING


def test_a_client_with_a_certificate_of_the_authority_is_served(ours):
    tls = ours.client(with_certificate=True)
    assert status(ours.server(mutual=True), tls) == health_pb2.HealthCheckResponse.SERVING


def test_a_server_of_another_authority_is_refused(ours, theirs):
    with pytest.raises(UnavailableError, match="the server's certificate is not of the CA that is trusted here"):
        status(theirs.server(), ours.client())


def test_a_server_of_another_name_is_refused(ours):
    with pytest.raises(UnavailableError, match="the server's certificate is of another name than it was called by"):
        status(ours.server("elsewhere.example"), ours.client())


def test_the_name_to_expect_can_be_given(ours):
    tls = replace(ours.client(), server_name="elsewhere.example")
    assert status(ours.server("elsewhere.example"), tls) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("shows_one", [False, True], ids=["none", "of another authority"])
def test_a_client_without_a_certificate_of_the_authority_is_refused(ours, theirs, shows_one):
    tls = replace(theirs.client(with_certificate=True), ca=ours.certificate) if shows_one else ours.client()
    with pytest.raises(UnavailableError, match="does the server want TLS, or a certificate of its clients"):
        status(ours.server(mutual=True), tls)


def test_a_client_without_tls_is_refused(ours):
    with pytest.raises(UnavailableError, match="does the server want TLS"):
        status(ours.server(), None)


def test_a_server_without_tls_is_refused(ours):
    with pytest.raises(UnavailableError, match="the server does not speak TLS"):
        status(None, ours.client())


def test_files_that_cannot_be_used_are_named(ours, theirs, tmp_path):
    certificate, key = ours.issue()
    _, other_key = theirs.issue()
    junk, missing = tmp_path / "junk.pem", tmp_path / "missing.pem"
    junk.write_text("junk")
    for tls, named in (
        (ServerTls(certificate, other_key), other_key),
        (ServerTls(junk, key), junk),
        (ServerTls(missing, key), missing),
        (ServerTls(certificate, key, junk), junk),
        (replace(ours.client(), ca=missing), missing),
        (replace(ours.client(), certificate=certificate, key=other_key), other_key),
    ):
        with pytest.raises(InvalidArgumentError, match=f"TLS .*{named}"):
            tls.credentials()


def test_the_healthcheck_shows_a_certificate(ours, capsys):
    certificate, key = ours.issue("client")
    tls_flags = ["--ca", str(ours.certificate), "--certificate", str(certificate), "--key", str(key)]

    async def run():
        service = ServiceServer(NAME, ours.server(mutual=True))
        port = await service.start("127.0.0.1", 0)
        await service.set_serving(True)
        code = await asyncio.to_thread(healthcheck, [f"127.0.0.1:{port}", *tls_flags])
        await service.stop(0)
        return code

    assert asyncio.run(run()) == 0, capsys.readouterr().err


def test_certificates_and_cas_renewed_on_disk_are_used_and_bad_ones_are_not(ours, theirs, caplog):
    """Each connection is a new one; those that are open keep what they began with."""
    server = ours.server(mutual=True)
    old, new = (authority.client(with_certificate=True) for authority in (ours, theirs))
    other = theirs.server(mutual=True)

    async def scenario(check):
        seen = [await check(old)]
        server.key.write_text("half of a key")
        seen.append(await check(old))
        for file, source in zip(server.files, other.files, strict=True):
            file.write_bytes(source.read_bytes())
        seen.append(await check(replace(new, ca=server.client_ca)))
        with pytest.raises(UnavailableError):
            await check(replace(old, ca=theirs.certificate))
        return seen

    with caplog.at_level(logging.INFO):
        assert with_server(server, scenario) == [health_pb2.HealthCheckResponse.SERVING] * 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert str(server.key) in caplog.records[0].getMessage()
