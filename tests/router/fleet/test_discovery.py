"""Workers behind DNS names: they come, go, and come back, while requests run."""

import asyncio
import logging
from pathlib import Path

import pytest

from fissile.v1 import GenerateRequest, GetStatsRequest
from router.config import RouterSettings
from router.fleet.discovery.dns import DnsSource, resolve_name
from router.fleet.discovery.file import FileSource, WatchedFile
from router.fleet.discovery.source import Endpoint
from router.targets import DnsTarget, FileTarget, KubernetesTarget, StaticTarget
from tests.fakes.ports import free_port
from tests.fakes.system import run_system, until
from tests.fakes.worker import FakeWorker, counts, says

NOWHERE = "127.0.0.1:1"
"""Nothing listens there."""


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
    return sorted(link.address for link in system.router.parts.workers.links.values() if link.is_available)


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
        about = {w.address: w for w in (await system.stub.GetStats(GetStatsRequest())).workers}[leaving.address]
        assert (about.healthy, about.detail) == (False, "gone from where workers are found; it finishes what it has")
        later = await ask(system)
        first = await running
        await until(lambda: list(system.router.parts.workers.links) == [staying.address])
        return first, later, list(system.router.parts.workers._tasks)

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
        await until(lambda: list(system.router.parts.workers.links) == [staying.address])
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
        names.found["pool"] = [NOWHERE]
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


def test_an_answer_that_lacks_addresses_takes_none_away_until_it_has_come_several_times():
    async def scenario():
        answers = [["a:1", "b:1"], [], ["b:1"], OSError("SERVFAIL"), ["a:1"], ["a:1"], ["a:1"], ["b:1"]]
        names = Names(pool=None)

        async def resolver(name):
            names.found["pool"] = answers.pop(0)
            return await names(name)

        source = DnsSource(DnsTarget("pool:1"), resolver, interval=0)
        watch = source.watch()
        return ["".join(sorted(e.address[0] for e in await anext(watch))) for _ in range(6)]

    assert asyncio.run(scenario()) == ["ab", "ab", "ab", "ab", "a", "ab"]


def test_an_outage_is_said_once_and_its_end_too(caplog):
    async def scenario():
        answers = [["a:1"], OSError("down"), OSError("down"), [], [], ["a:1"]]
        names = Names(pool=None)

        async def resolver(name):
            names.found["pool"] = answers.pop(0)
            return await names(name)

        watch = DnsSource(DnsTarget("pool:1"), resolver, interval=0).watch()
        for _ in range(2):
            await anext(watch)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert [record.message for record in caplog.records if "pool" in record.message] == [
        "workers at dns:///pool:1: cannot resolve the name: down; its workers stay",
        "workers at dns:///pool:1: the name has no address; its workers stay",
        "workers at dns:///pool:1: found",
    ]


def test_static_addresses_stay_whatever_names_do():
    static, named = FakeWorker(counts(3)), FakeWorker(counts(3))
    static.port = free_port()
    names = Names(pool=[])

    async def scenario(system):
        names.found["pool"] = [named.address]
        await until(lambda: len(available(system)) == 2)
        names.found["pool"] = [NOWHERE]
        await until(lambda: available(system) == [static.address])

    run(scenario, names, static, named, workers=[static.address, "dns:///pool:1"])


def test_a_file_is_read_again_when_it_changes_and_bad_lines_are_named(tmp_path, caplog):
    path = tmp_path / "workers"

    async def scenario():
        watch = FileSource(FileTarget(path), interval=0.005).watch()
        first = asyncio.create_task(anext(watch))
        await until(lambda: "No such file" in caplog.text)
        path.write_text("# two hosts\n10.0.0.1:5 # rack 1\n\n10.0.0.2\n  [fd00::1]:5")
        found = [await first]
        path.unlink()
        again = asyncio.create_task(anext(watch))
        await until(lambda: "its workers stay" in caplog.text)
        (tmp_path / "next").write_text("10.0.0.3:5\n")
        (tmp_path / "next").replace(path)
        found.append(await again)
        return [sorted(endpoint.address for endpoint in endpoints) for endpoints in found]

    with caplog.at_level(logging.INFO):
        assert asyncio.run(scenario()) == [["10.0.0.1:5", "[fd00::1]:5"], ["10.0.0.3:5"]]
    assert [record.message for record in caplog.records if record.name.startswith("router")] == [
        f"workers at file://{path}: [Errno 2] No such file or directory: '{path}'",
        f"{path}, line 4: '10.0.0.2' is no host:port and is left out",
        f"workers at file://{path}: found",
        f"workers at file://{path}: [Errno 2] No such file or directory: '{path}'; its workers stay",
        f"workers at file://{path}: found",
    ]


@pytest.mark.parametrize("content", [b"", b"# nothing yet\n", b"\xff\xfe\n", b"a:1\n" * 300_000])
def test_a_file_that_is_half_written_or_no_list_takes_nothing_away(tmp_path, content):
    path = tmp_path / "workers"
    path.write_text("10.0.0.1:5\n")

    async def scenario():
        watch = FileSource(FileTarget(path), interval=0.005).watch()
        await anext(watch)
        path.write_bytes(content)
        next_one = asyncio.create_task(anext(watch))
        await asyncio.sleep(0.05)
        assert not next_one.done()
        path.write_text("10.0.0.2:5\n")
        return await next_one

    assert asyncio.run(scenario()) == {Endpoint("10.0.0.2:5")}


def test_a_file_is_read_once_it_has_stayed_the_same(tmp_path):
    path = tmp_path / "workers"
    file = WatchedFile(path)
    seen = []
    for content in ("a", "ab", "abc", "abc", "abc", "abcd"):
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
        seen.append(file.look())
    assert seen == [None, None, None, "abc", None, None]


def test_the_resolver_of_this_machine():
    assert "127.0.0.1:7" in asyncio.run(resolve_name("localhost:7"))
    assert asyncio.run(resolve_name("127.0.0.1:7")) == ["127.0.0.1:7"]


TARGETS = {
    "10.0.0.1:5": StaticTarget("10.0.0.1:5"),
    "[::1]:5": StaticTarget("[::1]:5"),
    "dns:///a.b:5": DnsTarget("a.b:5"),
    "file:///etc/workers": FileTarget(Path("/etc/workers")),
    "kubernetes:///pool:grpc": KubernetesTarget("pool", "", "grpc"),
    "kubernetes:///pool.prod:50061": KubernetesTarget("pool", "prod", "50061"),
}


def test_targets_are_read():
    assert RouterSettings(workers=list(TARGETS)).targets() == list(TARGETS.values())


@pytest.mark.parametrize(
    "target",
    """dns:///name name name:0 name:70000 name:x :1 dns:///:1 file:/// http:///a:1 a:b:1 kubernetes:///pool
    kubernetes:///a.b.c:1 kubernetes:///pool:0 kubernetes:///pool:70000 kubernetes:///Pool:1""".split(),  # noqa: SIM905
)
def test_a_target_of_no_known_form_is_refused(target):
    with pytest.raises(ValueError, match=r"workers: .* must be host:port, dns:///host:port, file:///path or kub"):
        RouterSettings(workers=[target])


def test_localhost_as_a_name_end_to_end():
    worker = FakeWorker(says("ok"))

    async def resolver(name):
        return await resolve_name(f"localhost:{worker.port}")

    async def scenario(system):
        await until(lambda: system.router.parts.workers.is_ready)
        return (await ask(system)).text

    settings = {"workers": ["dns:///anything:1"]}
    assert run_system(scenario, worker, wait_ready=False, resolver=resolver, **settings) == "ok"
