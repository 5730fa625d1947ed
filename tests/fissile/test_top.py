"""`fissile top`: what it shows, in terminals of any size, and how it ends."""

import importlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from fissile.cli import main
from fissile.cli.dashboard import Dashboard, History, Sample
from fissile.errors import UnavailableError
from fissile.results import Quantiles, Stats, Worker

top_module = importlib.import_module("fissile.cli.top")  # the attribute of that name is the command
FISSILE = str(Path(sys.executable).with_name("fissile"))
BACK = b"\x1b[?1049l"
"""From the screen of its own to the ordinary one."""
NOTHING = Quantiles(0, 0, 0, 0, 0, 0, 0)
QUICK = Quantiles(count=9, mean=0.01, p50=0.0042, p90=0.1, p95=0.1, p99=0.25, max=0.3)


def worker(address="w:1", **fields):
    values = {
        "address": address, "healthy": True, "detail": "", "num_open_requests": 2, "num_running": 1, "num_waiting": 3,
        "num_blocks": 200, "num_used_blocks": 50, "num_generated_tokens": 0, "num_prefix_queries": 0,
        "num_prefix_hits": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0, "model": "llama", "model_version": "",
        "epoch": "e1", "ttft": QUICK, "tpot": NOTHING,
    }  # fmt: skip
    return Worker(**(values | fields))


def stats(*workers, **fields):
    values = {
        "ttft": QUICK, "tpot": NOTHING, "itl": NOTHING, "e2e": NOTHING, "num_open_requests": 4, "finished": {},
        "num_prompt_tokens": 0, "num_completion_tokens": 0, "uptime": 7300.0, "num_queued_requests": 1,
    }  # fmt: skip
    return Stats(**(values | fields), workers=workers)


def history_of(*seen):
    """One sample every two seconds."""
    history = History(60)
    for number, each in enumerate(seen):
        history.add(Sample(2.0 * number, each))
    return history


def shown(history, problem="", **console):
    console = Console(**({"width": 100, "color_system": None} | console))
    with console.capture() as capture:
        console.print(Dashboard("r:1", history, problem))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_what_it_shows():
    before = stats(worker(), finished={"eos": 1})
    busy = worker(num_generated_tokens=500, num_prefix_queries=400, num_prefix_hits=100)
    lost = worker("w:2", healthy=False, detail="connection refused", epoch="", ttft=NOTHING, num_blocks=0)
    after = stats(busy, lost, finished={"eos": 3, "length": 2}, num_completion_tokens=40)
    assert shown(history_of(before, after)) == [
        "r:1 · 4 open · 1 queued · 2.0 requests/s · 20 tokens/s · up 2 h",
        "p50/p99 ms: TTFT 4.2/250 · TPOT - · ITL - · E2E -",
        "worker  state  open  running  waiting   KV  hits     TTFT  TPOT  tokens/s",
        "w:2     down      2        1        3    -     -        -     -         -",
        "w:1     up        2        1        3  25%   25%  4.2/250     -       250",
        "w:2: connection refused",
    ]


def test_the_model_is_shown_where_there_are_several():
    others = [worker("w:2", model="qwen"), worker("w:3", model="qwen", model_version="canary")]
    title, *rows = shown(history_of(stats(worker(), *others)))[-4:]
    assert title.split()[:3] == ["worker", "state", "model"]
    assert [row.split()[2] for row in rows] == ["llama", "qwen", "qwen@canary"]


def test_a_worker_on_trial_is_shown_as_such():
    *_, row, detail = shown(history_of(stats(worker(detail="few requests, on trial: 5 requests in a row failed"))))
    assert row.split()[:2] == ["w:1", "ejected"]
    assert detail == "w:1: few requests, on trial: 5 requests in a row failed"


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (80, "worker state open running waiting KV hits TTFT TPOT tokens/s"),
        (60, "worker state running waiting KV TTFT tokens/s"),
        (40, "worker state running waiting"),
        (12, "worker"),
        (5, "work…"),
    ],
)
def test_a_narrow_terminal_shows_what_matters_most(width, columns):
    lines = shown(history_of(stats(worker())), width=width)
    assert max(map(len, lines)) <= width
    (title,) = [line for line in lines if line.startswith("work")]
    assert title.split() == columns.split()


def test_a_low_terminal_shows_the_first_and_says_how_many_more():
    workers = [worker(f"w:{number:02}") for number in range(30)]
    lines = shown(history_of(stats(*workers)), force_terminal=True, height=10)
    assert len(lines) <= 10
    assert lines[-2].startswith("w:04") and lines[-1] == "… 25 more"


def test_a_worker_that_was_started_anew_counts_anew():
    old, new = worker(num_generated_tokens=1000), worker(num_generated_tokens=10, epoch="e2")
    later = replace(new, num_generated_tokens=110)
    assert shown(history_of(stats(old), stats(new)))[-1].split()[-1] == "-"
    assert shown(history_of(stats(old), stats(new), stats(later)))[-1].split()[-1] == "25"


def test_a_router_that_was_started_anew_counts_anew():
    history = history_of(stats(num_completion_tokens=1000), stats(num_completion_tokens=5, uptime=1.0))
    assert "- tokens/s · up 1 s" in shown(history)[0]


def test_only_the_window_counts():
    history = History(10)
    for second in range(100):
        history.add(Sample(float(second), stats(num_completion_tokens=second**2)))
    assert history.rate(lambda sample: sample.stats.num_completion_tokens) == pytest.approx(99 + 89, abs=2)


def test_once_looks_twice_and_prints_once(address):
    result = CliRunner().invoke(main, ["top", "--once", "--interval", "0.1", "-a", address])
    assert result.exit_code == 0, result.output
    assert result.output.count(" open · 0 queued · ") == 1 and "50%   25%  500/990" in result.output
    assert "127.0.0.1:50062: connection refused" in result.output


def test_a_router_that_goes_is_asked_again():
    """With the last numbers in sight."""

    class Client:
        def __init__(self):
            self.answers = [stats(worker()), UnavailableError("gone"), UnavailableError("gone"), stats(worker())]

        def stats(self, window, timeout):
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    class Live:
        def __init__(self):
            self.frames = []

        def update(self, dashboard, refresh):
            self.frames.append(shown(dashboard._history, dashboard._problem))

    client, live, history = Client(), Live(), history_of(stats(worker()))
    top_module._watch(live, client, history, "r:1", 0.1, 60, lambda _seconds: not client.answers)
    problem = "r:1 does not answer: gone; trying again"
    assert [frame[0] == problem for frame in live.frames] == [False, False, True, True, False]
    assert all(frame[-1].startswith("w:1") for frame in live.frames)


@pytest.mark.parametrize("leave", ["q", "Ctrl-C"])
def test_it_ends_at_once_and_leaves_the_terminal_as_it_was(address, leave):
    terminal, child_side = pty.openpty()
    before = termios.tcgetattr(child_side)
    process = subprocess.Popen([FISSILE, "top", "-a", address], stdin=child_side, stdout=child_side, stderr=child_side)
    seen = b""
    while b"50%" not in seen:
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 65536)
    if leave == "q":
        os.write(terminal, b"q")
    else:
        process.send_signal(signal.SIGINT)
    while not seen.endswith(BACK):
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 65536)
    assert process.wait(60) == 0
    assert termios.tcgetattr(child_side) == before
    os.close(child_side)
    os.close(terminal)
