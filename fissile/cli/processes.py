"""Child processes of `fissile up`: started together, logged with a prefix, stopped together."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from fissile.parent import bound_to_this_process

LogLine = Callable[[str, str], None]
"""Called with a child's name and one line of its output, from a thread of that child."""

_KEPT_LINES = 30


class Child:
    """One child process. Lives in a session of its own, so that Ctrl-C in the terminal reaches only the parent. It
    ends with the thread that starts it."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str],
        log: LogLine,
        exited: "queue.SimpleQueue[Child]",
    ) -> None:
        """`environment` is added to this process's own."""
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log = log
        self._process = subprocess.Popen(
            bound_to_this_process(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=os.environ | environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, args=(exited,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; −n when signal n ended it."""
        return self._process.poll()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.last_lines.append(line.rstrip())
                self._log(self.name, line.rstrip())

    def _watch(self, exited: "queue.SimpleQueue[Child]") -> None:
        self._process.wait()
        self._read_to_the_end()
        exited.put(self)

    def _read_to_the_end(self) -> None:
        """Of a process that has ended. Its own children may hold the pipe open for longer than is worth waiting for."""
        self._reader.join(timeout=1.0)

    def terminate(self) -> None:
        if self.exit_code is None:
            self._process.terminate()

    def finish(self, timeout: float) -> None:
        """Wait for its end and its last lines; after `timeout` seconds kill it, and what it started, for good."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        self._read_to_the_end()

    def kill(self) -> None:
        """With what it started. Idempotent."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Children:
    """All children of one command, in order of their start. Start them in the main thread: they end with theirs."""

    def __init__(self, log: LogLine) -> None:
        self._log = log
        self._children: list[Child] = []
        self._exited: queue.SimpleQueue[Child] = queue.SimpleQueue()

    def start(self, name: str, command: list[str], environment: Mapping[str, str] = MappingProxyType({})) -> Child:
        child = Child(name, command, environment, self._log, self._exited)
        self._children.append(child)
        return child

    def wait_for_exit(self, timeout: float | None = None) -> Child | None:
        """The next child that ended, each once; None after `timeout` seconds. None as timeout waits for ever."""
        try:
            return self._exited.get(timeout=timeout)
        except queue.Empty:
            return None

    def stop(self, grace: float, name: str | None = None) -> None:
        """SIGTERM to all, or to those of this name, then SIGKILL to those left after `grace` seconds. Idempotent."""
        chosen = [child for child in self._children if name in (None, child.name)]
        for child in chosen:
            child.terminate()
        deadline = time.monotonic() + grace
        for child in chosen:
            child.finish(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """All at once. Idempotent."""
        for child in self._children:
            child.kill()
