"""Signals that end a service."""

import signal
import subprocess
import sys

import pytest

SIGNALLED = """
import asyncio
import signal
import subprocess
import sys
import time
from common.signals import stop_event_on_signals
async def main():
    stop = stop_event_on_signals()
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_second_signal_ends_the_process_at_once_and_in_silence():
    command = [sys.executable, "-c", SIGNALLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 130


SIGNALS = """
import asyncio
import os
import signal
from common.signals import stop_event_on_signals
async def main():
    stop = stop_event_on_signals()
    stop.set()
    for _ in range({}):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
asyncio.run(main())
"""


@pytest.mark.parametrize(("number", "code"), [(1, 0), (2, 130)])
def test_a_second_signal_ends_the_process_and_not_the_first_after_another_cause(number, code):
    """A worker is stopped by those that it steps together with, too, and then by who stops them all."""
    assert subprocess.run([sys.executable, "-c", SIGNALS.format(number)], timeout=60).returncode == code
