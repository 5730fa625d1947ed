"""Log lines of a state that may change as fast as somebody else likes."""

import asyncio
from collections.abc import Callable

QUIET_SECONDS = 5.0


class StateLog:
    """A line a change, but one in `quiet_seconds` at most: then one for the last of several, which counts them. Used on
    one event loop."""

    def __init__(self, tell: Callable[[bool, str], None], quiet_seconds: float = QUIET_SECONDS) -> None:
        """`tell` writes the line: of the state, with a text that is empty or says how many changes it stands for."""
        self._tell = tell
        self._quiet_seconds = quiet_seconds
        self._state = False
        self._num_changes = 0
        """That no line was written of."""
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, state: bool) -> None:
        self._state = state
        self._num_changes += 1
        if self._timer is None:
            self._write()

    def close(self) -> None:
        """Nothing is written any more."""
        if self._timer:
            self._timer.cancel()

    def _write(self) -> None:
        self._timer = None
        if self._num_changes:
            number, self._num_changes = self._num_changes, 0
            self._timer = asyncio.get_running_loop().call_later(self._quiet_seconds, self._write)
            self._tell(self._state, f" (after {number} changes in {self._quiet_seconds:g} s)" if number > 1 else "")
