"""A router and its workers on this machine, each a process of its own. `fissile up` and `fissile demo` run one.

What both services can be told in the environment reaches them: flags, which win over it, are only for what the services
must agree on, and for what somebody said here.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from fissile.cli.processes import Child, Children, LogLine
from fissile.cli.services import service_command
from fissile.healthcheck import health
from fissile.ports import check_can_listen
from fissile.tls import ClientTls

ROUTER = "router"
EXIT_SECONDS = 15.0
"""For a service to end once nothing is open there."""
MESSAGES_PER_CORE = 64
"""A second, from the router to all clients: some hundredths of each core, which the workers use as well. On two cores
each of 8 streams hears as often as the router hears of it, and each of 32 four times a second."""
MAX_MESSAGES = 3000
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
    drain_timeout: float = 30.0
    """Seconds that open requests have to finish at the end."""
    api_key: str = ""
    """What clients must show to the router; empty: nothing."""
    worker_environments: tuple[Mapping[str, str], ...] = ()
    """Added to this process's own: one for each worker, if any."""


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
    """Start everything, yield once all of it is healthy, and stop everything at the end, whatever happens: open
    requests may finish, but a KeyboardInterrupt while they do kills all.

    Raises StartError, with the last lines of its log, if a service ends or is not healthy within the time, and
    UnavailableError, before anything is started, if a port of the router is taken.
    """
    _check_ports(config)
    children = Children(log)
    try:
        with tempfile.TemporaryDirectory(prefix="fissile-") as folder:
            yield _start(config, children, Path(folder))
    finally:
        _stop(children, config.drain_timeout)


def _check_ports(config: ClusterConfig) -> None:
    """The router would say it, too, but only starts when the workers have told of their ports, seconds later."""
    check_can_listen(_host("FISSILE_ROUTER_HOST"), config.port)
    if config.http_port is not None:
        check_can_listen(_host("FISSILE_ROUTER_HTTP_HOST"), config.http_port, " for HTTP")


def _stop(children: Children, drain_timeout: float) -> None:
    """The router first: what is open there needs the workers to the end."""
    try:
        children.stop(drain_timeout + EXIT_SECONDS, ROUTER)
        children.stop(EXIT_SECONDS)
    except KeyboardInterrupt:
        children.kill()
        raise


def _start(config: ClusterConfig, children: Children, folder: Path) -> Cluster:
    deadline = time.monotonic() + config.start_timeout
    files = {}
    for number in range(config.num_workers):
        path = folder / f"worker-{number}"
        environment = config.worker_environments[number] if config.worker_environments else {}
        files[children.start(path.name, _worker_command(config, path), environment)] = path
    workers = {
        child: local_address("FISSILE_WORKER_HOST", _bound_port(child, path, children, deadline))
        for child, path in files.items()
    }
    port_file, http_port_file = folder / "router", folder / "http"
    arguments = ["--port", str(config.port), "--port-file", str(port_file), "--workers", ",".join(workers.values())]
    arguments += ["--drain-timeout", str(config.drain_timeout), *_message_rate()]
    if config.http_port is not None:
        arguments += ["--http-port", str(config.http_port), "--http-port-file", str(http_port_file)]
    # Not as a flag, which others can see.
    secrets = {"FISSILE_ROUTER_API_KEY": config.api_key} if config.api_key else {}
    router = children.start(ROUTER, service_command("router", arguments), secrets)
    router_address = local_address("FISSILE_ROUTER_HOST", _bound_port(router, port_file, children, deadline))
    for child, address in workers.items():
        _wait_until_serving(child, address, worker_tls(), children, deadline)
    _wait_until_serving(router, router_address, router_tls(), children, deadline)
    http_address = None
    if config.http_port is not None:
        http_port = _bound_port(router, http_port_file, children, deadline)
        scheme = "https" if router_tls() else "http"
        http_address = f"{scheme}://{local_address('FISSILE_ROUTER_HTTP_HOST', http_port)}"
    return Cluster(router, router_address, http_address, workers, children)


def local_address(host_variable: str, port: int) -> str:
    """Where a service can be reached from this machine whose host, if any, is in this environment variable."""
    host = _host(host_variable)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host(variable: str) -> str:
    return os.environ.get(variable, "127.0.0.1")


def worker_tls() -> ClientTls | None:
    """As the router connects to the workers."""
    return _tls("FISSILE_ROUTER_WORKER_TLS") if "FISSILE_WORKER_TLS_CERTIFICATE" in os.environ else None


def router_tls() -> ClientTls | None:
    """As the other commands connect to the router."""
    return _tls("FISSILE_TLS") if "FISSILE_ROUTER_TLS_CERTIFICATE" in os.environ else None


def _tls(prefix: str) -> ClientTls:
    ca, certificate, key = (
        Path(value) if (value := os.environ.get(f"{prefix}_{name}")) else None for name in ("CA", "CERTIFICATE", "KEY")
    )
    return ClientTls(ca, certificate, key)


def _worker_command(config: ClusterConfig, port_file: Path) -> list[str]:
    arguments = ["--port", "0", "--port-file", str(port_file), "--model", config.model]
    is_said = "FISSILE_WORKER_NUM_THREADS" in os.environ
    if not is_said and not any(argument.startswith("--num-threads") for argument in config.worker_arguments):
        # Workers that each take all cores slow each other down.
        arguments += ["--num-threads", str(max(1, len(os.sched_getaffinity(0)) // config.num_workers))]
    return service_command("worker", [*arguments, *config.worker_arguments])


def _message_rate() -> list[str]:
    """Of a router that shares this machine's cores with its workers."""
    if "FISSILE_ROUTER_MAX_MESSAGE_RATE" in os.environ:
        return []
    rate = min(MESSAGES_PER_CORE * len(os.sched_getaffinity(0)), MAX_MESSAGES)
    return ["--max-message-rate", str(rate)]


def _bound_port(child: Child, port_file: Path, children: Children, deadline: float) -> int:
    while not port_file.exists():
        _pause(child, children, deadline, "did not listen in time")
    return int(port_file.read_text())


def _wait_until_serving(child: Child, address: str, tls: ClientTls | None, children: Children, deadline: float) -> None:
    while (status := health(address, tls=tls)) != "SERVING":
        _pause(child, children, deadline, f"at {address} is {status}")


def _pause(child: Child, children: Children, deadline: float, complaint: str) -> None:
    """Wait a little. Raises StartError if any child has ended meanwhile, or if time is up."""
    ended = children.wait_for_exit(_POLL_SECONDS)
    if ended is not None:
        raise StartError(ended, f"ended during the start with code {ended.exit_code}")
    if time.monotonic() >= deadline:
        raise StartError(child, complaint)
