"""Services as processes, started once for all end-to-end tests: a router and two workers of SmolLM2 that nobody hurts,
and the same of a tiny model that may be killed."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from fissile import Client
from fissile.cli.cluster import Cluster, ClusterConfig, running_cluster
from fissile.cli.processes import Child, Children
from fissile.cli.services import service_command
from fissile.healthcheck import wait_until_serving
from tests.e2e.fleet import Fleet, running_fleet

WORKER_ARGUMENTS = (
    "--max-model-len", "2048", "--num-threads", "1", "--kv-cache-gib", "0.5",
    "--quantization", "none",  # what is compared with transformers is float32
)  # fmt: skip


FLEET = {"test_chaos.py", "test_faults.py"}
OWN = {"test_lockstep.py", "test_models.py", "test_up.py"}
"""Files whose tests use the fleet, and those that start services of their own; the others use the cluster."""


class _OneProcessForTheSameServices(LoadScopeScheduling):
    """Where several processes run tests beside each other, services that files share are started once."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folder, _, file = path.rpartition("/")
        if not folder.endswith("e2e") or file in OWN:
            return path
        return "fleet" if file in FLEET else "cluster"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _OneProcessForTheSameServices(config, log)


@pytest.fixture(scope="session")
def log() -> list[str]:
    """All lines of the cluster so far, by whose they are."""
    return []


@pytest.fixture(scope="session")
def cluster(log: list[str]) -> Iterator[Cluster]:
    with running_cluster(
        ClusterConfig(2, 0, "smollm2", WORKER_ARGUMENTS, http_port=0), lambda name, line: log.append(f"{name} {line}")
    ) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.router_address) as connected:
        yield connected


@pytest.fixture
def idle(cluster: Cluster) -> Callable[[], None]:
    """Waits until no worker of the cluster runs or holds anything; fails if that takes long."""

    def wait() -> None:
        deadline = time.monotonic() + 15
        with Client(cluster.router_address) as connected:
            while True:
                workers = connected.stats().workers
                busy = [(w.num_running, w.num_waiting, w.num_used_blocks, w.num_open_requests) for w in workers]
                if all(entry == (0, 0, 0, 0) for entry in busy):
                    return
                assert time.monotonic() < deadline, busy
                time.sleep(0.1)

    return wait


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), num_workers=2, num_routers=1) as running:
        yield running


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """A router over two workers of a tiny model, all there whatever an earlier test did to them."""
    shared_fleet.restore()
    return shared_fleet


class Services:
    """Further services of one test, stopped at its end."""

    def __init__(self, folder: Path) -> None:
        self.children = Children(lambda _name, _line: None)
        self._folder = folder

    def start(self, name: str, kind: str, *arguments: str, port: int = 0) -> tuple[Child, str]:
        """Start a router or worker, wait until it is healthy, and return it with its address."""
        child = self.launch(name, kind, *arguments, port=port)
        return child, self.address_of(name, child)

    def launch(self, name: str, kind: str, *arguments: str, port: int = 0) -> Child:
        """Start one that does not become healthy before others are there, too."""
        port_file = self._port_file(name)
        port_file.unlink(missing_ok=True)
        command = service_command(kind, ["--port", str(port), "--port-file", str(port_file), *arguments])
        return self.children.start(name, command)

    def address_of(self, name: str, child: Child) -> str:
        """Once it is healthy."""
        port_file, deadline = self._port_file(name), time.monotonic() + 60
        while not port_file.exists():
            assert child.exit_code is None and time.monotonic() < deadline, list(child.last_lines)
            time.sleep(0.05)
        address = f"127.0.0.1:{port_file.read_text().strip()}"
        assert wait_until_serving(address, 60) == "SERVING", list(child.last_lines)
        return address

    def _port_file(self, name: str) -> Path:
        return self._folder / f"{name}.port"


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    started = Services(tmp_path)
    yield started
    started.children.stop(5)
