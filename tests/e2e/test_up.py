"""`fissile up` with a tiny model: how it starts, what it says, and that nothing outlives it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fissile import Client
from tests.fakes.tiny_model import ARGUMENTS, write_tiny_model

FISSILE = str(Path(sys.executable).parent / "fissile")
SMALL = ("--", "--num-blocks", "256", *ARGUMENTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def up(*arguments: str) -> tuple[subprocess.Popen[str], dict[str, int], str]:
    """`fissile up`, once it is ready, with the process ids of its services and the router's address."""
    command = [FISSILE, "up", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    pids: dict[str, int] = {}
    address = ""
    assert process.stdout is not None
    for line in process.stdout:
        if row := re.search(r"(router|HTTP|worker-\d) .*\s(\d+)\s+[│|]$", line.strip()):
            pids[row[1]] = int(row[2])
        if ready := re.search(r"Ready.* --address (\S+)", line):
            address = ready[1]
            break
        if "WARNING" in line and "common.loop_lag" not in line:  # which is of the machine
            process.kill()
            raise AssertionError(line)
    return process, pids, address


def gone(pids: dict[str, int]) -> bool:
    """Whether all these processes end soon."""
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_an_interrupt_of_up_waits_for_open_requests_and_stops_all(model):
    process, pids, address = up("--workers", "1", "--http-port", "0", "--model", model, *SMALL)
    assert sorted(pids) == ["HTTP", "router", "worker-0"] and pids["HTTP"] == pids["router"]
    with Client(address) as client:
        stream = client.generate("Once", max_tokens=2000, temperature=0, ignore_eos=True)
        next(stream)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal: to the whole group
        answer = stream.result()
    output, _ = process.communicate()
    assert (answer.completions[0].finish.reason, answer.usage.num_completion_tokens) == ("length", 2000)
    assert process.returncode == 0
    assert "stopping; open requests have 30 s to finish, Ctrl-C again stops at once\n" in output
    assert "draining: open requests (1) have 30 s to finish\n" in output
    assert gone(pids)


def test_up_reports_dead_workers_and_ends_after_the_last(model):
    process, pids, _ = up("--workers", "1", "--model", model, *SMALL)
    os.kill(pids["worker-0"], signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "worker-0 ended with code -9\nno worker is left" in output
    assert gone(pids)


def test_nothing_outlives_an_up_that_was_killed(model):
    process, pids, _ = up("--workers", "1", "--model", model, *SMALL)
    pids["rank"] = psutil.Process(pids["worker-0"]).children()[0].pid
    process.kill()
    process.communicate()
    assert gone(pids)


def failed_up(*arguments: str) -> str:
    """Standard error of a `fissile up` that cannot start."""
    result = subprocess.run([FISSILE, "up", *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "Traceback" not in result.stderr, result
    return result.stderr


def test_up_with_a_wrong_worker_flag_says_which():
    said = failed_up("--port", "0", "--", "--no-such-flag")
    assert "No such option" in said
    assert said.endswith("Error: worker-0 ended during the start with code 2\n")


def test_quiet_up_still_says_why_it_failed():
    said = failed_up("--quiet", "--port", "0", "--model", "/no/such")
    assert said.startswith("Error: worker-0 ended during the start with code 1; its last lines:\n")
    assert "no model '/no/such'" in said


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_up_on_a_taken_port_says_so_before_it_starts_anything(flag):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = failed_up("--port", "0", flag, port)
    purpose = " for HTTP" if flag == "--http-port" else ""
    assert said == f"Error: unavailable: cannot listen on 127.0.0.1:{port}{purpose}: Address already in use\n"


@pytest.mark.parametrize("service", ["router", "worker"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--no-such-flag"], "No such option"), (["--port", "x"], "--port: Input should be a")],
)
def test_wrong_flags_of_a_service(service, arguments, said):
    result = subprocess.run([FISSILE, service, *arguments], capture_output=True, text=True)
    assert result.returncode == 2
    assert said in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("service", ["router", "worker"])
def test_help_of_a_service(service):
    result = subprocess.run([FISSILE, service, "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and "--port-file" in result.stdout
