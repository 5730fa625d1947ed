"""Starts processes of ours that speak over inherited pipes, and looks at them. They import the same `worker` as this
one."""

import os
import subprocess
import sys
from pathlib import Path


def spawn(
    module: str, arguments: tuple[int, ...], stderr: int | None, inherited: tuple[int, ...]
) -> "subprocess.Popen[str]":
    """`python -m module` with these arguments and these file descriptors. `stderr`: as for Popen."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        pass_fds=inherited, stdin=subprocess.DEVNULL, stderr=stderr, text=True, errors="replace",
        env=_environment(),
    )  # fmt: skip


def is_stopped(pid: int) -> bool:
    """Whether the system holds that process (SIGSTOP). False where there is no /proc to ask."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def _environment() -> dict[str, str]:
    """With the folder of `worker`, wherever it was found. Threads of OpenMP wait asleep, unless the environment says
    otherwise: awake they would keep the cores from ours, and from the services."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return (
        {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PYTHONPATH": root if path is None else root + os.pathsep + path}
    )
