"""Who calls, as both fronts tell it to the API."""

from types import SimpleNamespace

import httpx2
import pytest

from common.host_bound import HostBound
from common.hosts import host_of_peer, name_of_host
from fissile.errors import ResourceExhaustedError
from fissile.v1 import ListModelsRequest
from router.callers.caller import Caller, Quota
from tests.fakes.system import run_system
from tests.fakes.worker import FakeWorker, says


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[fe80::1%25eth0]:4711", "fe80::1%eth0"),
        ("unix:", "unix"),
        ("unix:/run/fissile.sock", "unix"),
    ],
)
def test_a_peer_without_a_key_is_called_by_its_host(peer, host):
    assert host_of_peer(peer) == host


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::7", "2001:db8:1:2::/64"),
        ("::1", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("unix", "unix"),
    ],
)
def test_who_has_many_addresses_is_one_caller(host, name):
    assert name_of_host(host) == name


def test_a_network_of_addresses_has_the_bound_of_one_host():
    bound = HostBound("calls", of_host=2, in_all=100)
    calls = [SimpleNamespace(peer=lambda i=i: f"ipv6:%5B2001:db8:1:2::{i}%5D:4711") for i in range(3)]
    with bound.entered(calls[0]), bound.entered(calls[1]):
        with pytest.raises(ResourceExhaustedError, match="calls: 2 of 2 of this host"), bound.entered(calls[2]):
            pass
        with bound.entered(SimpleNamespace(peer=lambda: "ipv6:%5B2001:db8:1:3::1%5D:4711")):
            assert bound.num_open == 3
    assert bound.num_open == 0


def test_both_fronts_say_who_calls(monkeypatch):
    async def scenario(system):
        callers = []
        list_models = system.router.parts.api.list_models

        async def noting(request, caller):
            callers.append(caller)
            return await list_models(request, caller)

        monkeypatch.setattr(system.router.parts.api, "list_models", noting)
        await system.stub.ListModels(ListModelsRequest())
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{system.router.http_port}") as client:
            await client.get("/v1/models")
        return callers

    assert run_system(scenario, FakeWorker(says("a")), http_port=0) == [Caller("127.0.0.1")] * 2


def test_salts_of_tenants_never_meet():
    """Whatever a request asks for, it stays among the prefixes of its own tenant."""
    nobody, acme, other = (Caller("x", tenant) for tenant in ("", "acme", "acme2"))
    asked = [b"", b"2", b"a", acme.cache_salt(b""), acme.cache_salt(b"a"), b"\0\0\0\4acme"]
    salts = [caller.cache_salt(salt) for caller in (nobody, acme, other) for salt in asked]
    assert len(set(salts)) == len(salts)
    assert nobody.cache_salt(b"") == b"", "who has no tenant and asks for nothing shares what all share"
    assert acme.cache_salt(b"a") == Caller("another key", "acme").cache_salt(b"a"), "keys of one tenant share"


def test_models_that_a_quota_names_by_id_or_alias():
    caller = Caller("x", quota=Quota(models=frozenset({"toy", "nick"})))
    assert [caller.may_use(names) for names in (["toy"], ["big", "nick"], ["big"])] == [True, True, False]
    assert Caller("y").may_use(["big"])
