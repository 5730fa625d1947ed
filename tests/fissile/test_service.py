"""`python -m fissile.service`."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ctrl_c_ends_a_service_that_imports_without_a_word():
    service = subprocess.Popen(
        [sys.executable, "-P", "-m", "fissile.service", "tests.fakes.slow_import"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert service.stdout.readline() == "importing\n"
    service.send_signal(signal.SIGINT)
    assert service.communicate(timeout=10) == ("", "")
    assert service.returncode == -signal.SIGINT
