"""Addresses in a file, one a line, with comments behind `#`. It is read again when it changes.

Whoever writes it need not replace it in one go: it is read once it has stayed the same from one look to the next, and
one without an address is taken for one that is still written.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from router.fleet.discovery.outage import Outage
from router.fleet.discovery.source import Endpoint
from router.targets import FileTarget, is_address

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024
MAX_LINES_NAMED = 5

Signature = tuple[int, int, int]
"""Inode, size and time of change: another one when the file is written or replaced."""


class FileSource:
    known: frozenset[Endpoint] = frozenset()

    def __init__(self, target: FileTarget, interval: float) -> None:
        """`interval`: seconds between looks."""
        self._target = target
        self._interval = interval

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        outage = Outage(self._target, may_come_late=True)
        file = WatchedFile(self._target.path)
        while True:
            try:
                text = await asyncio.to_thread(file.look)
            except (OSError, ValueError) as error:
                outage.goes_on(str(error))
            else:
                endpoints = None if text is None else _endpoints(text, self._target.path)
                if endpoints:
                    outage.is_over()
                    yield endpoints
                elif endpoints is not None:
                    outage.goes_on("the file names no address")
            await asyncio.sleep(self._interval)


class WatchedFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Signature | None = None
        """At the last look."""
        self._read: Signature | None = None

    def look(self) -> str | None:
        """What is in it, if it has stayed the same since the last look and was not read yet. Raises OSError, and
        ValueError for a file that is too long."""
        before, self._seen = self._seen, None
        about = self._path.stat()
        self._seen = about.st_ino, about.st_size, about.st_mtime_ns
        if self._seen != before or self._seen == self._read:
            return None
        text = _read(self._path)
        self._read = self._seen
        return text


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"the file has more than {MAX_FILE_BYTES} bytes")
    return content.decode(errors="replace")


def _endpoints(text: str, path: Path) -> frozenset[Endpoint]:
    """Of the lines that hold an address; the first of the others are named in the log."""
    lines = {number: line.partition("#")[0].strip() for number, line in enumerate(text.splitlines(), 1)}
    bad = [(number, line) for number, line in lines.items() if line and not is_address(line)]
    for number, line in bad[:MAX_LINES_NAMED]:
        logger.warning("%s, line %d: %.100r is no host:port and is left out", path, number, line)
    if len(bad) > MAX_LINES_NAMED:
        logger.warning("%s: and %d lines more", path, len(bad) - MAX_LINES_NAMED)
    return frozenset(Endpoint(line) for line in lines.values() if is_address(line))
