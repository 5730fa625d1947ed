"""A router and two SmolLM2 workers as processes, started once for all end-to-end tests."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fissile import Client
from fissile.cli.cluster import Cluster, ClusterConfig, running_cluster
from fissile.cli.processes import Child, Children
from fissile.cli.services import service_command
from fissile.healthcheck import wait_until_serving

WORKER_ARGUMENTS = (
    "--max-model-len", "2048", "--num-threads", "1", "--kv-cache-gib", "0.5",
    "--quantization", "none",  # what is compared with transformers is float32
)  # fmt: skip


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
