"""Processes that end with the one that started them, however it ends: nobody is left to stop them after a SIGKILL.

`python -m fissile.parent PID COMMAND...` binds itself to its parent and becomes COMMAND: any command can be bound, and
nothing of ours runs between fork and exec. The kernel's side of it exists on Linux only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 3


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; at once if that has happened."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


def bound_to_this_process(command: list[str]) -> list[str]:
    """`command`, to be started by this process in a thread that lives as long as the command may."""
    return [sys.executable, "-P", "-m", "fissile.parent", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
