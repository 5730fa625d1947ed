"""A router and its workers on this machine, each a process of its own. `fissile up` and `fissile demo` run one."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from fissile.cli.processes import Child, Children, LogLine
from fissile.cli.services import service_command
from fissile.healthcheck import health

HOST = "127.0.0.1"
_POLL_SECONDS = 0.1


class StartError(click.ClickException):
    """A service did not become healthy. `complaint` is one line; the message adds the last lines of its log."""

    def __init__(self, child: Child, complaint: str) -> None:
        self.complaint = f"{child.name} {complaint}"
        super().__init__("\n".join([f"{self.complaint}; its last lines:", *(f"  {line}" for line in child.last_lines)]))


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    num_workers: int
    port: int
    """Of the router; 0 takes a free one. Workers always take free ones."""
    model: str
    worker_arguments: tuple[str, ...] = ()
    http_port: int | None = None
    """Of the router's HTTP front; 0 takes a free one, None has no front."""
    start_timeout: float = 300.0
    stop_grace: float = 10.0
    api_key: str = ""
    """What clients must show to the router; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster."""

    router: Child
    router_address: str
    http_address: str | None
    """A URL."""
    workers: dict[Child, str]
    """With their addresses."""
    children: Children


@contextmanager
def running_cluster(config: ClusterConfig, log: LogLine) -> Iterator[Cluster]:
    """Start everything, yield once all of it is healthy, and stop everything at the end, whatever happens.

    Raises StartError, with the last lines of its log, if a service ends or is not healthy within the time.
    """
    children = Children(log)
    try:
        with tempfile.TemporaryDirectory(prefix="fissile-") as folder:
            yield _start(config, children, Path(folder))
    finally:
        children.stop(config.stop_grace)


def _start(config: ClusterConfig, children: Children, folder: Path) -> Cluster:
    deadline = time.monotonic() + config.start_timeout
    files = {
        children.start(f"worker-{number}", _worker_command(config, folder / f"worker-{number}")): (
            folder / f"worker-{number}"
        )
        for number in range(config.num_workers)
    }
    workers = {child: _bound_address(child, path, children, deadline) for child, path in files.items()}
    port_file = folder / "router"
    arguments = ["--host", HOST, "--port", str(config.port), "--port-file", str(port_file)]
    arguments += ["--workers", ",".join(workers.values())]
    http_port_file = folder / "http"
    if config.http_port is not None:
        arguments += ["--http-host", HOST, "--http-port", str(config.http_port)]
        arguments += ["--http-port-file", str(http_port_file)]
    # Not as a flag, which others can see.
    secrets = {"FISSILE_ROUTER_API_KEY": config.api_key} if config.api_key else {}
    router = children.start("router", service_command("router", arguments), secrets)
    router_address = _bound_address(router, port_file, children, deadline)
    for child, address in (*workers.items(), (router, router_address)):
        _wait_until_serving(child, address, children, deadline)
    http_address = None
    if config.http_port is not None:
        http_address = f"http://{_bound_address(router, http_port_file, children, deadline)}"
    return Cluster(router, router_address, http_address, workers, children)


def _worker_command(config: ClusterConfig, port_file: Path) -> list[str]:
    arguments = ["--host", HOST, "--port", "0", "--port-file", str(port_file), "--model", config.model]
    if not any(argument.startswith("--num-threads") for argument in config.worker_arguments):
        # Workers that each take all cores slow each other down.
        arguments += ["--num-threads", str(max(1, len(os.sched_getaffinity(0)) // config.num_workers))]
    return service_command("worker", [*arguments, *config.worker_arguments])


def _bound_address(child: Child, port_file: Path, children: Children, deadline: float) -> str:
    while not (port_file.exists() and port_file.read_text().strip()):
        _pause(child, children, deadline, "did not listen in time")
    return f"{HOST}:{int(port_file.read_text())}"


def _wait_until_serving(child: Child, address: str, children: Children, deadline: float) -> None:
    while (status := health(address)) != "SERVING":
        _pause(child, children, deadline, f"at {address} is {status}")


def _pause(child: Child, children: Children, deadline: float, complaint: str) -> None:
    """Wait a little. Raises StartError if any child has ended meanwhile, or if time is up."""
    ended = children.wait_for_exit(_POLL_SECONDS)
    if ended is not None:
        raise StartError(ended, f"ended during the start with code {ended.exit_code}")
    if time.monotonic() >= deadline:
        raise StartError(child, complaint)
