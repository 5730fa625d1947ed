"""TLS and keys on both sides of the router, as one system."""

import logging
from dataclasses import replace

import grpc
import pytest

from fissile.errors import InvalidArgumentError
from fissile.v1 import GenerateRequest, GetStatsRequest
from router.config import RouterSettings
from tests.fakes.certificates import Authority
from tests.fakes.system import error_of, run_system, until
from tests.fakes.worker import FakeWorker, says
from worker.face.access import Access, Grant, Role


@pytest.fixture
def ours(tmp_path):
    return Authority(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path):
    return Authority(tmp_path / "theirs")


def serving(tls):
    """Settings of a router that serves with `tls`."""
    return {"tls_certificate": tls.certificate, "tls_key": tls.key, "tls_client_ca": tls.client_ca}


def connecting(tls):
    """Settings of a router that connects to its workers with `tls`."""
    return {
        "worker_tls": True,
        "worker_tls_ca": tls.ca,
        "worker_tls_certificate": tls.certificate,
        "worker_tls_key": tls.key,
    }


async def answer(system):
    return (await system.ask(GenerateRequest(text="a"))).text


async def link_detail(system):
    """Why the router cannot reach its worker, as an operator sees it."""
    (link,) = system.router.parts.workers.links.values()
    await until(lambda: "not connected yet" not in link.detail)
    return (await system.stub.GetStats(GetStatsRequest())).workers[0].detail


def test_mutual_tls_from_client_to_worker(ours):
    worker = FakeWorker(says(" Paris"), tls=ours.server(mutual=True))
    client = ours.client(with_certificate=True)
    settings = {**serving(ours.server(mutual=True)), **connecting(client)}
    assert run_system(answer, worker, tls=client, **settings) == " Paris"


def test_a_worker_of_another_authority_gets_nothing(ours, theirs, caplog):
    worker = FakeWorker(says("x"), tls=theirs.server())

    async def scenario(system):
        detail = await link_detail(system)
        return detail, await error_of(system.ask(GenerateRequest(text="a")))

    detail, error = run_system(scenario, worker, wait_ready=False, worker_wait=0.1, **connecting(ours.client()))
    assert "the server's certificate is not of the CA that is trusted here" in detail
    assert error.code == grpc.StatusCode.UNAVAILABLE
    assert worker.received == []
    assert [record.levelname for record in caplog.records] == ["WARNING"], "waiting will not help"


def test_a_router_without_a_certificate_is_told_what_its_worker_wants(ours):
    worker = FakeWorker(says("x"), tls=ours.server(mutual=True))
    detail = run_system(link_detail, worker, wait_ready=False, **connecting(ours.client()))
    assert "does the server want TLS, or a certificate of its clients?" in detail


def test_workers_behind_a_name_show_a_certificate_of_that_name(ours):
    """Their addresses come and go, so no certificate names them."""
    worker = FakeWorker(says("ok"), tls=ours.server("workers.example"))

    async def resolver(name):
        return [worker.address]

    async def scenario(system):
        await until(lambda: system.router.parts.workers.is_ready)
        return await answer(system)

    settings = {"workers": ["dns:///workers.example:50061"], **connecting(ours.client())}
    assert run_system(scenario, worker, wait_ready=False, resolver=resolver, **settings) == "ok"


def test_unusable_files_stop_the_start(ours, theirs, tmp_path):
    missing = replace(ours.client(), ca=tmp_path / "missing.pem")
    _, other_key = theirs.issue()
    mismatched = replace(ours.server(), key=other_key)
    for settings in (connecting(missing), serving(mismatched)):
        with pytest.raises(InvalidArgumentError, match="TLS"):
            run_system(answer, workers=["127.0.0.1:1"], **settings)


def test_tls_files_for_workers_without_tls_are_refused(ours):
    """They would be ignored, and the connection be readable for everyone."""
    with pytest.raises(ValueError, match="worker-tls-ca and worker-tls-certificate need worker-tls"):
        RouterSettings(worker_tls_ca=ours.certificate)


def test_certificates_renewed_on_disk_are_used_at_the_next_connection(ours, theirs):
    worker = FakeWorker(says("ok"), tls=theirs.server())

    async def scenario(system):
        await link_detail(system)
        ours.certificate.write_bytes(theirs.certificate.read_bytes())
        await until(lambda: system.router.parts.workers.is_ready)
        return await answer(system)

    assert run_system(scenario, worker, wait_ready=False, **connecting(ours.client())) == "ok"


WORKER_KEY = "router-router-router"


def test_a_router_shows_its_workers_the_key(caplog):
    worker = FakeWorker(says(" Paris"), access=Access([Grant(Role.ROUTER, frozenset({WORKER_KEY}))]))
    with caplog.at_level(logging.DEBUG):
        assert run_system(answer, worker, worker_key=WORKER_KEY) == " Paris"
    assert WORKER_KEY not in caplog.text


def test_a_router_that_a_worker_does_not_know_is_told_so(caplog):
    worker = FakeWorker(says("x"), access=Access([Grant(Role.ROUTER, frozenset({WORKER_KEY}))]))
    detail = run_system(link_detail, worker, wait_ready=False, worker_key="another-key")
    assert detail == "a key or a certificate of a router or an operator is needed"
    assert [record.levelname for record in caplog.records] == ["WARNING"], "waiting will not help"
