"""Workers behind DNS names: they come, go, and come back, while requests run."""

import asyncio

import pytest

from fissile.v1 import GenerateRequest
from router.config import RouterSettings
from router.fleet.workers import resolve_name
from tests.fakes.system import free_port, run_system, until
from tests.fakes.worker import FakeWorker, counts, says


class Names:
    """A resolver that a test can change. An exception as value is raised."""

    def __init__(self, **found):
        self.found = found

    async def __call__(self, name):
        found = self.found[name.partition(":")[0]]
        if isinstance(found, Exception):
            raise found
        return found


def run(scenario, names, *workers, **settings):
    targets = {"workers": [f"dns:///{name}:1" for name in names.found], "resolve_interval": 0.02, **settings}
    return run_system(scenario, *workers, wait_ready=False, resolver=names, policy="round_robin", **targets)


def two_workers():
    return FakeWorker(counts(40), step_seconds=0.01), FakeWorker(counts(40), step_seconds=0.01)


async def ask(system):
    return await system.ask(GenerateRequest(text="hello"))


def available(system):
    return sorted(link.address for link in system.router.workers.links.values() if link.is_available)


def test_all_addresses_behind_a_name_are_used():
    workers = two_workers()
    names = Names(pool=[])

    async def scenario(system):
        names.found["pool"] = [w.address for w in workers]
        await until(lambda: len(available(system)) == 2)
        await asyncio.gather(*(ask(system) for _ in range(4)))

    run(scenario, names, *workers)
    assert [len(w.received) for w in workers] == [2, 2]


def test_an_address_that_appears_is_used_by_a_request_that_waits_for_one():
    worker = FakeWorker(counts(3))
    names = Names(pool=[])

    async def scenario(system):
        waiting = asyncio.create_task(ask(system))
        await asyncio.sleep(0.05)
        names.found["pool"] = [worker.address]
        return await waiting

    assert run(scenario, names, worker, worker_wait=10).usage.num_completion_tokens == 3


def test_an_address_that_disappears_gets_nothing_new_finishes_what_runs_and_is_dropped():
    leaving, staying = two_workers()
    names = Names(pool=[])

    async def scenario(system):
        names.found["pool"] = [leaving.address]
        await until(lambda: available(system) == [leaving.address])
        running = asyncio.create_task(ask(system))
        await until(lambda: leaving.running)
        names.found["pool"] = [staying.address]
        await until(lambda: available(system) == [staying.address])
        assert leaving.address in system.router.workers.links
        later = await ask(system)
        first = await running
        await until(lambda: list(system.router.workers.links) == [staying.address])
        return first, later, list(system.router.workers._tasks)

    first, later, tasks = run(scenario, names, leaving, staying)
    assert first.usage.num_completion_tokens == later.usage.num_completion_tokens == 40
    assert (len(leaving.received), len(staying.received)) == (1, 1)
    assert tasks == [staying.address]


def test_requests_of_an_address_that_disappears_and_dies_move():
    leaving, staying = two_workers()
    names = Names(pool=[])

    async def scenario(system):
        names.found["pool"] = [leaving.address]
        await until(lambda: available(system) == [leaving.address])
        running = asyncio.create_task(ask(system))
        await until(lambda: leaving.num_emitted >= 5)
        names.found["pool"] = [staying.address]
        await until(lambda: available(system) == [staying.address])
        await leaving.kill()
        answer = await running
        await until(lambda: list(system.router.workers.links) == [staying.address])
        return answer

    assert run(scenario, names, leaving, staying).usage.num_completion_tokens == 40
    assert len(staying.received[0].token_ids) > staying.received[0].num_prompt_tokens


def test_an_address_that_comes_back_while_it_is_leaving_is_used_again():
    worker = FakeWorker(counts(40), step_seconds=0.01)
    names = Names(pool=[])

    async def scenario(system):
        names.found["pool"] = [worker.address]
        await until(lambda: available(system))
        running = asyncio.create_task(ask(system))
        await until(lambda: worker.running)
        names.found["pool"] = []
        await until(lambda: not available(system))
        waiting = asyncio.create_task(ask(system))
        names.found["pool"] = [worker.address]
        return [await running, await waiting]

    answers = run(scenario, names, worker, worker_wait=10)
    assert [a.usage.num_completion_tokens for a in answers] == [40, 40]
    assert worker.num_streams == 1


@pytest.mark.parametrize("failure", [OSError("name server down"), UnicodeError("label too long")])
def test_a_name_that_cannot_be_resolved_keeps_its_workers_and_holds_up_no_other_name(failure):
    a, b = FakeWorker(counts(3)), FakeWorker(counts(3))
    names = Names(first=[], second=[])

    async def scenario(system):
        names.found["first"] = [a.address]
        await until(lambda: available(system) == [a.address])
        names.found["first"] = failure
        names.found["second"] = [b.address]
        await until(lambda: len(available(system)) == 2)

    run(scenario, names, a, b)


def test_static_addresses_stay_whatever_names_do():
    static, named = FakeWorker(counts(3)), FakeWorker(counts(3))
    static.port = free_port()
    names = Names(pool=[])

    async def scenario(system):
        names.found["pool"] = [named.address]
        await until(lambda: len(available(system)) == 2)
        names.found["pool"] = []
        await until(lambda: available(system) == [static.address])

    run(scenario, names, static, named, workers=[static.address, "dns:///pool:1"])


def test_the_resolver_of_this_machine():
    assert "127.0.0.1:7" in asyncio.run(resolve_name("localhost:7"))
    assert asyncio.run(resolve_name("127.0.0.1:7")) == ["127.0.0.1:7"]


@pytest.mark.parametrize("target", ["dns:///name", "name", "name:0", "name:70000", "name:x", ":1", "dns:///:1"])
def test_a_target_without_host_or_port_is_refused(target):
    with pytest.raises(ValueError, match=r"must be host:port or dns:///host:port"):
        RouterSettings(workers=[target])


def test_localhost_as_a_name_end_to_end():
    worker = FakeWorker(says("ok"))

    async def resolver(name):
        return await resolve_name(f"localhost:{worker.port}")

    async def scenario(system):
        await until(lambda: system.router.workers.is_ready)
        return (await ask(system)).text

    settings = {"workers": ["dns:///anything:1"]}
    assert run_system(scenario, worker, wait_ready=False, resolver=resolver, **settings) == "ok"
