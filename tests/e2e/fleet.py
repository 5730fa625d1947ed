"""Workers and routers as processes, that can be killed, stopped and cut off, and brought back."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from fissile import Client
from fissile.cli.processes import Child, Children
from fissile.cli.services import service_command
from fissile.healthcheck import wait_until_serving
from fissile.results import Stats, Worker
from tests.e2e.proxy import Proxy
from tests.fakes.ports import free_port
from tests.fakes.tiny_model import ARGUMENTS, write_tiny_model

WAIT_SECONDS = 90.0
WORKER_FLAGS = (
    "--num-blocks", "4096", "--max-num-seqs", "64", "--served-model-name", "tiny", "--drain-timeout", "0", *ARGUMENTS,
)  # fmt: skip


@dataclass
class Service:
    """One process, which others find at `address`, whatever process that is."""

    name: str
    flags: tuple[str, ...]
    port: int
    child: Child
    proxy: Proxy | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.proxy.port if self.proxy else self.port}"

    @property
    def rank_pid(self) -> int:
        """Of a worker."""
        (rank,) = (p for p in psutil.Process(self.child.pid).children() if "worker.runner.process" in p.cmdline())
        return rank.pid

    def signal(self, number: int) -> None:
        """One that is killed is gone when this returns."""
        os.kill(self.child.pid, number)
        while number == signal.SIGKILL and self.child.exit_code is None:
            time.sleep(0.005)

    def signal_rank(self, number: int) -> None:
        os.kill(self.rank_pid, number)


class Fleet:
    """Routers over the same workers of a tiny model; each router reaches each worker through that one's proxy."""

    def __init__(self, children: Children, folder: Path) -> None:
        self._children, self._folder = children, folder
        self._model = write_tiny_model(folder / "model")
        self.workers: list[Service] = []
        self.routers: list[Service] = []

    def start(self, num_workers: int, num_routers: int) -> None:
        """All at once; returns when each router sees each worker."""
        for number in range(num_workers):
            worker = self._start("worker", f"worker-{number}", ("--model", str(self._model), *WORKER_FLAGS))
            worker.proxy = Proxy(worker.port)
            self.workers.append(worker)
        addresses = ",".join(worker.address for worker in self.workers)
        for number in range(num_routers):
            self.routers.append(self._start("router", f"router-{number}", ("--workers", addresses)))
        self.wait_until_whole()

    @property
    def addresses(self) -> list[str]:
        """Of the routers."""
        return [router.address for router in self.routers]

    def num_open(self, number: int, *, of_router: bool) -> int:
        """Requests of a router, or on a worker, by number."""
        routers = self.routers[number : number + 1] if of_router else self.routers
        addresses = [worker.address for worker in self.workers]
        return sum(
            worker.num_open_requests
            for router in routers
            for worker in _stats(router).workers
            if of_router or worker.address == addresses[number]
        )

    def num_generated_tokens(self) -> int:
        """Of all workers, since each started."""
        return sum(worker.num_generated_tokens for worker in _stats(self.routers[0]).workers)

    def restore(self) -> None:
        """Whatever was done to it: afterwards all is there again."""
        for worker in self.workers:
            assert worker.proxy is not None
            worker.proxy.mend()
        for service in [*self.workers, *self.routers]:
            if service.child.exit_code is None:
                service.signal(signal.SIGCONT)
        for worker in self.workers:
            self._restart_if_lost(worker, "worker")
        for router in self.routers:
            self._restart_if_lost(router, "router")
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        for service in [*self.workers, *self.routers]:
            assert wait_until_serving(f"127.0.0.1:{service.port}", WAIT_SECONDS) == "SERVING", service.child.last_lines
        for router in self.routers:
            while not all(worker.healthy for worker in _stats(router).workers):
                assert time.monotonic() < deadline, _stats(router).workers
                time.sleep(0.05)

    def wait_until_idle(self) -> None:
        """Nothing is open or held anywhere."""
        deadline = time.monotonic() + WAIT_SECONDS
        for router in self.routers:
            while any(num for worker in _stats(router).workers for num in _held(worker)):
                assert time.monotonic() < deadline, _stats(router).workers
                time.sleep(0.05)

    def _restart_if_lost(self, service: Service, kind: str) -> None:
        """One whose rank was hurt is about to end, or has ended; a rank that goes on keeps its worker."""
        if kind == "worker" and service.child.exit_code is None and not _has_running_rank(service):
            deadline = time.monotonic() + WAIT_SECONDS
            while service.child.exit_code is None:
                assert time.monotonic() < deadline, f"{service.name} lives on without its rank"
                time.sleep(0.05)
        if service.child.exit_code is not None:
            service.child = self._spawn(kind, service.name, service.flags, service.port)

    def _start(self, kind: str, name: str, flags: tuple[str, ...]) -> Service:
        port = free_port()
        return Service(name, flags, port, self._spawn(kind, name, flags, port))

    def _spawn(self, kind: str, name: str, flags: tuple[str, ...], port: int) -> Child:
        command = service_command(kind, ["--port", str(port), "--log-level", "warning", *flags])
        return self._children.start(name, command)


@contextmanager
def running_fleet(folder: Path, num_workers: int, num_routers: int) -> Iterator[Fleet]:
    children = Children(lambda _name, _line: None)
    fleet = Fleet(children, folder)
    try:
        fleet.start(num_workers, num_routers)
        yield fleet
    finally:
        children.kill()
        for worker in fleet.workers:
            if worker.proxy:
                worker.proxy.close()


def _stats(router: Service) -> Stats:
    with Client(router.address) as client:
        return client.stats()


def _held(worker: Worker) -> tuple[int, ...]:
    return worker.num_open_requests, worker.num_running, worker.num_waiting, worker.num_used_blocks


def _has_running_rank(worker: Service) -> bool:
    try:
        return psutil.Process(worker.rank_pid).status() != psutil.STATUS_STOPPED
    except (ValueError, psutil.NoSuchProcess):
        return False
