"""What `fissile up` tells the services and what it leaves to the environment, and the order of their end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fissile.cli.cluster import ClusterConfig, _message_rate, _worker_command, local_address, router_tls, worker_tls
from fissile.tls import ClientTls


def flags(*worker_arguments: str) -> list[str]:
    """Those that a worker of two is started with."""
    command = _worker_command(ClusterConfig(2, 0, "smollm2", worker_arguments), Path("port"))
    return command[command.index("worker") + 1 :]


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))


def test_workers_share_the_cores():
    assert flags() == ["--port", "0", "--port-file", "port", "--model", "smollm2", "--num-threads", "4"]


def test_threads_in_the_environment_are_obeyed(monkeypatch):
    monkeypatch.setenv("FISSILE_WORKER_NUM_THREADS", "2")
    assert "--num-threads" not in flags()


def test_threads_in_the_arguments_are_obeyed():
    assert flags("--num-threads", "2")[-2:] == ["--num-threads", "2"]
    assert flags().count("--num-threads") == flags("--num-threads=2").count("--num-threads") + 1


def test_the_router_sends_as_often_as_cores_that_it_shares_allow_unless_the_environment_says(monkeypatch):
    assert _message_rate() == ["--max-message-rate", "512"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(96)))
    assert _message_rate() == ["--max-message-rate", "3000"]
    monkeypatch.setenv("FISSILE_ROUTER_MAX_MESSAGE_RATE", "50")
    assert _message_rate() == []


@pytest.mark.parametrize(
    ("host", "address"),
    [
        (None, "127.0.0.1:7"),
        ("0.0.0.0", "127.0.0.1:7"),
        ("::", "[::1]:7"),
        ("10.0.0.1", "10.0.0.1:7"),
        ("localhost", "localhost:7"),
    ],
)
def test_a_host_in_the_environment_is_where_the_service_is_found(host, address, monkeypatch):
    if host is not None:
        monkeypatch.setenv("FISSILE_ROUTER_HOST", host)
    assert local_address("FISSILE_ROUTER_HOST", 7) == address


def test_services_told_to_use_tls_are_asked_for_their_health_over_tls(monkeypatch):
    assert (router_tls(), worker_tls()) == (None, None)
    for name, value in {
        "FISSILE_ROUTER_TLS_CERTIFICATE": "router.pem",
        "FISSILE_TLS_CA": "ca.pem",
        "FISSILE_WORKER_TLS_CERTIFICATE": "worker.pem",
        "FISSILE_ROUTER_WORKER_TLS_CERTIFICATE": "shown.pem",
        "FISSILE_ROUTER_WORKER_TLS_KEY": "shown.key",
    }.items():
        monkeypatch.setenv(name, value)
    assert router_tls() == ClientTls(Path("ca.pem"))
    assert worker_tls() == ClientTls(None, Path("shown.pem"), Path("shown.key"))


PARENT = """
import signal, sys
from fissile.cli.cluster import _stop
from fissile.cli.processes import Children

CHILD = '''
import os, signal, sys, time
name, seconds = sys.argv[1:]
def say(word):
    # A signal may come while the line before is being printed, and print cannot be entered twice.
    os.write(1, word + os.linesep.encode())
def end(*_):
    say(b"asked")
    time.sleep(float(seconds))
    say(b"ended")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, lambda *_: say(b"interrupted"))
say(b"ready")
time.sleep(60)
'''
children = Children(lambda name, line: print(f"{name} {line}\\n", end="", flush=True))
for name in ("worker-0", "router"):
    children.start(name, [sys.executable, "-c", CHILD, name, sys.argv[1]])
try:
    signal.pause()
except KeyboardInterrupt:
    pass
try:
    _stop(children, 30)
except KeyboardInterrupt:
    print("at once", flush=True)
"""


@pytest.fixture
def parent(request):
    """A process with a router and a worker, each of which takes so many seconds to end; in a group of its own, as what
    a shell starts is."""
    command = [sys.executable, "-c", PARENT, str(request.param)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    yield process
    process.kill()
    process.communicate()


def lines_until(parent, *wanted: str) -> list[str]:
    lines = []
    while not set(wanted) <= set(lines):
        line = parent.stdout.readline()
        assert line, lines
        lines.append(line.rstrip())
    return lines


@pytest.mark.parametrize("parent", [0.2], indirect=True)
def test_the_router_drains_before_the_workers_are_asked_to_end(parent):
    lines_until(parent, "router ready", "worker-0 ready")
    os.killpg(parent.pid, signal.SIGINT)  # as Ctrl-C in a terminal: to the whole group
    out, _ = parent.communicate(timeout=20)
    assert out.split("\n")[:-1] == ["router asked", "router ended", "worker-0 asked", "worker-0 ended"]


@pytest.mark.parametrize("parent", [60], indirect=True)
def test_a_second_interrupt_ends_all_at_once(parent):
    lines_until(parent, "router ready", "worker-0 ready")
    children = psutil.Process(parent.pid).children()
    os.killpg(parent.pid, signal.SIGINT)
    lines_until(parent, "router asked")
    os.killpg(parent.pid, signal.SIGINT)
    assert "at once" in parent.communicate(timeout=20)[0]
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
