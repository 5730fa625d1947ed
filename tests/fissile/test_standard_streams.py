"""Commands whose standard streams are closed, full, or of an encoding that lacks characters."""

import json
import os
import subprocess
import sys

import pytest

from tests.fissile.conftest import FISSILE


@pytest.mark.parametrize(
    ("redirected", "code", "out", "err"),
    [
        ("generate {} <&-", 0, "\n", ""),  # an empty prompt, and the fake answers with it
        ("chat {} <&-", 0, "", ""),
        ("generate {} hello >&-", 0, "", ""),
        ("generate {} hello >/dev/full", 1, "", "Error: [Errno 28] No space left on device\n"),
        ("stats {} >/dev/full", 1, "", "Error: [Errno 28] No space left on device\n"),
        ("top --once --interval 0.1 {} | true", 0, "", ""),
    ],
)
def test_streams_that_are_closed_or_full_make_no_traceback(address, redirected, code, out, err):
    command = f"{FISSILE} {redirected.format(f'--address {address}')}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=buffered)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_a_closed_stream_is_no_socket_of_the_service_that_takes_the_place():
    code = (
        "import os, sys; from fissile.cli.standard_streams import make_usable; make_usable(); "
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    )
    look = "import json, os; print(json.dumps([os.readlink(f'/proc/self/fd/{number}') for number in range(3)]))"
    closed = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" "$2" <&- 2>&-', sys.executable, code, look], capture_output=True, text=True
    )
    stdin, stdout, stderr = json.loads(closed.stdout)
    assert stdin == stderr == "/dev/null" and stdout.startswith("pipe:")


def test_lines_of_services_are_taken_after_their_reader_has_gone():
    code = (
        "import sys; from fissile.cli.up import log_line; log_line('one', 'a'); sys.stdin.read(1); "
        "[log_line('one', 'b') for _ in range(3)]; print('went on')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr.readline().endswith("| a\n")
    process.stderr.close()
    process.stdin.write("x")
    process.stdin.close()
    assert process.stdout.read() == "went on\n"
    process.stdout.close()
    process.wait()


def test_characters_that_the_encoding_lacks_are_replaced(address):
    command = [FISSILE, "top", "--once", "--interval", "0.1", "--address", address]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "") and "? up" in done.stdout


def test_an_error_in_mid_stream_begins_on_a_line_of_its_own(run):
    result = run("generate", "cut")
    assert (result.exit_code, result.stdout) == (1, "cut\n")
    assert result.stderr.startswith("Error: ")
