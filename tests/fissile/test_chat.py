"""`fissile chat` against a service that answers by rote."""

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable

from tests.fissile.conftest import FISSILE


def test_chat_keeps_the_history(run, service):
    result = run("chat", "--system", "be brief", stdin="hello\n\nagain\n/exit\nnot read\n")
    assert result.stdout == "2messages\n4messages\n"
    assert [message.content for message in service.requests[1].messages] == [
        "be brief",
        "hello",
        "2messages",
        "again",
    ]


def test_chat_shows_reasoning_apart_and_keeps_it(run, service):
    result = run("chat", stdin="think\nagain\n")
    assert result.stdout == "well\n\n1messages\n3messages\n"
    answer = service.requests[1].messages[1]
    assert (answer.reasoning, answer.content) == ("well", "1messages")


def test_chat_reset_forgets_all_but_the_system_message(run, service):
    run("chat", "-s", "be brief", stdin="hello\n/reset\nagain\n")
    assert [message.content for message in service.requests[1].messages] == ["be brief", "again"]


def test_chat_in_a_terminal(address):
    terminal, child_side = pty.openpty()
    process = subprocess.Popen([FISSILE, "chat", "-a", address], stdin=child_side, stdout=child_side, stderr=child_side)
    os.close(child_side)
    assert "fake at" in read_until(terminal, "> ")
    # Ctrl-C does not end the program. One that comes just before readline waits for input is seen only with the next.
    assert "/exit" in read_until(terminal, "> ", lambda: process.send_signal(signal.SIGINT))
    os.write(terminal, b"hi\n")
    assert "1messages" in read_until(terminal, "> ")
    os.write(terminal, b"\x04")  # Ctrl-D
    assert process.wait(10) == 0
    assert read_until(terminal, "\n").endswith("\n"), "the shell's prompt begins on a line of its own"
    os.close(terminal)


def read_until(terminal: int, end: str, ask: Callable[[], None] = lambda: None) -> str:
    """What the terminal shows, up to `end`. `ask` is called at first and whenever nothing comes for a second."""
    text = ""
    deadline = time.monotonic() + 15
    ask()
    while not text.endswith(end):
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 1.0)[0]:
            text += os.read(terminal, 1024).decode(errors="replace")
        elif not text:
            ask()
    return text
