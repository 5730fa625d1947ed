"""How long the parts of something took."""

import os
import sys
import time
from pathlib import Path


class LapWatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._parts: list[tuple[str, float]] = []

    def lap(self, part: str, seconds: float | None = None) -> None:
        """`part` has ended; without `seconds` it has taken the time since the last lap."""
        now = time.monotonic()
        self._parts.append((part, now - self._last if seconds is None else seconds))
        self._last = now

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return sum(seconds for _, seconds in self._parts)

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self._parts)


def process_seconds() -> float:
    """Since this process was started; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0.0
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
