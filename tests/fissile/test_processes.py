"""Child processes of `fissile up`."""

import subprocess
import sys
import threading
import time

import psutil

from fissile.cli.processes import Children
from fissile.parent import EXIT_ORPHANED
from tests.leaks import leaving_nothing_open


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


class Log:
    """Collects lines and wakes who waits for one."""

    def __init__(self):
        self.lines = []
        self.changed = threading.Condition()

    def __call__(self, name, line):
        with self.changed:
            self.lines.append((name, line))
            self.changed.notify_all()

    def wait_for(self, entry):
        with self.changed:
            assert self.changed.wait_for(lambda: entry in self.lines, timeout=10)


def test_a_child_is_given_a_secret_that_its_command_line_does_not_show():
    log = Log()
    children = Children(log)
    children.start("one", python("import os; print(os.environ['SECRET'], 'PATH' in os.environ)"), {"SECRET": "key"})
    children.wait_for_exit(10)
    assert log.lines == [("one", "key True")]


@leaving_nothing_open()
def test_lines_are_logged_under_the_childs_name():
    log = Log()
    children = Children(log)
    child = children.start("one", python("import sys; print('out'); print('err', file=sys.stderr)"))
    assert children.wait_for_exit(10) is child
    assert sorted(log.lines) == [("one", "err"), ("one", "out")]
    assert (child.exit_code, sorted(child.last_lines)) == (0, ["err", "out"])


def test_every_exit_is_reported_once():
    children = Children(Log())
    started = {children.start(str(code), python(f"raise SystemExit({code})")) for code in (3, 4)}
    assert {children.wait_for_exit(10), children.wait_for_exit(10)} == started
    assert children.wait_for_exit(0.05) is None


def test_stop_is_gentle_first():
    log = Log()
    children = Children(log)
    code = "import signal, time\nsignal.signal(15, lambda *_: exit(7))\nprint('ready', flush=True)\ntime.sleep(60)"
    child = children.start("one", python(code))
    log.wait_for(("one", "ready"))
    children.stop(grace=10)
    assert child.exit_code == 7


def test_stop_kills_who_does_not_listen_and_what_it_started():
    log = Log()
    children = Children(log)
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)"
    )
    child = children.start("one", python(code))
    while not child.last_lines:
        time.sleep(0.01)
    grandchild = psutil.Process(int(child.last_lines[0]))
    children.stop(grace=0.1)
    assert child.exit_code == -9
    psutil.wait_procs([grandchild], timeout=5)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


PARENT = """
import sys, time
from fissile.cli.processes import Children
child = Children(lambda *_: None).start("one", [sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_children_do_not_outlive_a_parent_that_was_killed():
    parent = subprocess.Popen(python(PARENT), stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    _, left = psutil.wait_procs([child], timeout=5)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def test_a_command_whose_parent_has_gone_does_not_start(tmp_path):
    path = tmp_path / "started"
    ended = subprocess.run([sys.executable, "-P", "-m", "fissile.parent", "0", "touch", str(path)])
    assert (ended.returncode, path.exists()) == (EXIT_ORPHANED, False)
