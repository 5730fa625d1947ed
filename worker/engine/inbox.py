"""How other threads talk to the engine thread: commands, in order, without polling."""

import threading
from collections import deque
from collections.abc import Callable

Command = Callable[[], None]
"""Runs on the engine thread, between two steps."""


class Inbox:
    """Many threads post, one takes."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self.is_waited_on = False
        """Somebody waits for a first command."""

    def post(self, command: Command) -> bool:
        """Queue `command`. False, and it will never run, once closed."""
        with self._changed:
            if self._is_closed:
                return False
            self._commands.append(command)
            self._changed.notify()
            return True

    def take(self, timeout: float | None) -> list[Command]:
        """All that wait, in order. If there are none, waits `timeout` seconds (None: for ever) for the first."""
        with self._changed:
            if not self._commands and timeout != 0:
                self.is_waited_on = True
                self._changed.wait_for(lambda: bool(self._commands), timeout)
                self.is_waited_on = False
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def close(self) -> None:
        """Nothing is accepted any more, and what waits is dropped. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._commands.clear()
