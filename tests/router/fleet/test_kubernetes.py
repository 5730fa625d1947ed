"""Workers that are the pods of a Kubernetes service."""

import asyncio
import logging

import pytest

from fissile.errors import FailedPreconditionError
from router.fleet.discovery.kubernetes import KubernetesSource
from router.fleet.discovery.kubernetes_api import in_cluster
from router.fleet.discovery.source import Endpoint
from router.targets import KubernetesTarget
from tests.fakes.kubernetes import NAMESPACE, FakeKubernetes, pod


class Watched:
    """What a source has found last."""

    def __init__(self, source):
        self.found = None
        self._source = source
        self._news = asyncio.Event()

    async def run(self):
        async for endpoints in self._source.watch():
            self.found = endpoints
            self._news.set()

    async def has(self, *addresses):
        async with asyncio.timeout(20):
            while self.found is None or {endpoint.address for endpoint in self.found} != set(addresses):
                self._news.clear()
                await self._news.wait()


def watch(tmp_path, scenario, namespace="", port="grpc", prepare=lambda api: None):
    async def run():
        api = FakeKubernetes(tmp_path)
        access = await api.start()
        prepare(api)
        watched = Watched(KubernetesSource(KubernetesTarget("pool", namespace, port), access, backoff=0.01))
        task = asyncio.create_task(watched.run())
        try:
            return await scenario(api, watched)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await api.stop()

    return asyncio.run(run())


def test_pods_come_and_go_with_the_slices_of_the_service(tmp_path):
    async def scenario(api, watched):
        await watched.has()
        api.put("pool-1", [pod("10.0.0.1", ready=True), pod("10.0.0.2", ready=False)])
        await watched.has("10.0.0.1:50061", "10.0.0.2:50061")  # whether one takes requests it says itself
        assert Endpoint("10.0.0.1:50061", f"pool.{NAMESPACE}.svc") in watched.found
        api.put("pool-2", [pod("10.0.1.1"), pod("10.0.0.2")])
        await watched.has("10.0.0.1:50061", "10.0.0.2:50061", "10.0.1.1:50061")
        api.put("pool-1", [pod("10.0.0.1", ready=False, serving=True, terminating=True)])
        await watched.has("10.0.1.1:50061", "10.0.0.2:50061")
        api.bookmark()
        api.delete("pool-2")
        api.put("pool-1", None)
        await watched.has()
        return api.requests

    assert watch(tmp_path, scenario, namespace=NAMESPACE) == ["list", "watch 100"]


def test_a_watch_goes_on_where_it_ended_and_after_a_bookmark_behind_that(tmp_path):
    async def scenario(api, watched):
        api.seconds_of_a_watch = 0.05
        api.put("pool-1", [pod("10.0.0.1")])
        await watched.has("10.0.0.1:50061")
        api.bookmark()
        while "watch 102" not in api.requests:
            await asyncio.sleep(0.01)
        api.forget()
        api.put("pool-1", [pod("10.0.0.2")])
        await watched.has("10.0.0.2:50061")
        return api.requests.count("list")

    assert watch(tmp_path, scenario) == 1


def test_a_version_that_is_too_old_makes_it_list_again(tmp_path):
    async def scenario(api, watched):
        api.put("pool-1", [pod("10.0.0.1")])
        await watched.has("10.0.0.1:50061")
        api.end_watches()
        api.delete("pool-1")
        api.put("pool-2", [pod("10.0.0.2")])
        api.forget()
        await watched.has("10.0.0.2:50061")
        return api.requests

    requests = watch(tmp_path, scenario)
    assert requests.count("list") == 2 and requests[-1] == "watch 103"


def test_while_the_api_refuses_or_is_away_the_workers_stay(tmp_path, caplog):
    async def scenario(api, watched):
        api.put("pool-1", [pod("10.0.0.1")])
        await watched.has("10.0.0.1:50061")
        api.may = set()
        api.end_watches()
        while "the API answered 403" not in caplog.text:
            await asyncio.sleep(0.01)
        found = watched.found
        api.put("pool-1", [pod("10.0.0.2")])
        api.may = {"list", "watch"}
        await watched.has("10.0.0.2:50061")
        return found

    with caplog.at_level(logging.INFO):
        assert watch(tmp_path, scenario) == {Endpoint("10.0.0.1:50061", f"pool.{NAMESPACE}.svc")}
    said = [r for r in caplog.records if r.name.startswith("router") and "answered 403" in r.message]
    assert {r.levelname for r in said} == {"WARNING"} and len(said) <= 2  # of the watch, and of the list after it
    assert "must be allowed to list and watch endpointslices" in said[0].message
    assert "first" not in caplog.text  # the token


def test_a_token_that_was_replaced_is_read_again(tmp_path):
    async def scenario(api, watched):
        await watched.has()
        api.set_token("second")
        api.end_watches()
        api.put("pool-1", [pod("10.0.0.1")])
        await watched.has("10.0.0.1:50061")

    watch(tmp_path, scenario)


@pytest.mark.parametrize(("port", "found"), [("7000", ["10.0.0.1:7000"]), ("metrics", ["10.0.0.1:9101"]), ("x", [])])
def test_ports_are_the_pods_by_number_or_name(tmp_path, port, found):
    def prepare(api):
        api.put("pool-1", [pod("10.0.0.1")])

    watch(tmp_path, lambda api, watched: watched.has(*found), port=port, prepare=prepare)


def test_of_two_families_one_counts_as_a_pod_is_one_worker(tmp_path):
    async def scenario(api, watched):
        api.put("pool-6", [pod("fd00::1")], "IPv6")
        await watched.has("[fd00::1]:50061")
        api.put("pool-4", [pod("10.0.0.1")], "IPv4")
        await watched.has("10.0.0.1:50061")
        api.put("pool-4", [pod("a.example")], "FQDN")
        await watched.has("[fd00::1]:50061")

    watch(tmp_path, scenario)


def test_what_is_no_endpoint_slice_is_named_and_takes_nothing_away(tmp_path, caplog):
    async def scenario(api, watched):
        api.put("pool-1", [pod("10.0.0.1")])
        await watched.has("10.0.0.1:50061")
        api.put("pool-1", [{"addresses": "10.0.0.2"}])
        while "cannot be understood" not in caplog.text:
            await asyncio.sleep(0.01)
        api.put("pool-1", [pod("10.0.0.3")])
        await watched.has("10.0.0.3:50061")

    watch(tmp_path, scenario)
    assert "event.MODIFIED.object.endpoints.0.addresses: Input should be a valid array" in caplog.text


def test_outside_of_a_cluster_it_says_what_is_missing(tmp_path):
    variables = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    for environment in ({}, variables):
        with pytest.raises(FailedPreconditionError, match="needs a pod with a service account"):
            in_cluster(tmp_path, environment)
    (tmp_path / "token").write_text("t")
    assert in_cluster(tmp_path, variables).server == "https://[fd00::1]:443"
