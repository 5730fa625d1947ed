"""Logging of both services: one line an event, to standard error, as text or as JSON.

With JSON every line is an object, also what comes past logging: warnings, exceptions that nobody caught, and whatever
Python code writes to standard error. What C code writes there by itself cannot be caught in this process; of a
worker's ranks it is, because their standard error is a pipe (`worker.executor.local`).
"""

import asyncio
import io
import json
import logging
import sys
import threading
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import lru_cache
from types import TracebackType
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

STDERR = "stderr"
"""Logger of lines that were written to standard error and not logged."""
GATHER_SECONDS = 0.01
"""How long a line of a gathering log may wait for others."""
_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

logger = logging.getLogger(__name__)


class TextFormatter(logging.Formatter):
    """Time with its zone, level, logger and message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _iso_time(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what was given as `extra=` becomes further keys."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _iso_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({key: value for key, value in vars(record).items() if key not in _PLAIN})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        return json.dumps(entry, default=str)


@lru_cache(maxsize=2)
def _iso_second(second: int) -> tuple[str, str]:
    """What stands before and behind the milliseconds. Lines of one second share it: to make it takes 3 µs."""
    text = datetime.fromtimestamp(second).astimezone().isoformat()
    return text[:19], text[19:]


def _iso_time(record: logging.LogRecord) -> str:
    milliseconds = int(record.created * 1000)
    before, zone = _iso_second(milliseconds // 1000)
    return f"{before}.{milliseconds % 1000:03d}{zone}"


class GatheringHandler(logging.StreamHandler[TextIO]):
    """Writes lines of an event loop together: to wake the reader of each costs more than the line. A warning, whatever
    comes from elsewhere and the end of the process take with them what waits, so the order is kept."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record) + self.terminator)
            loop = _running_loop() if record.levelno < logging.WARNING else None
            if loop is None:
                self.flush()
            elif len(self._lines) == 1:
                loop.call_later(GATHER_SECONDS, self._flush_later)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        with self.lock or nullcontext():
            text, self._lines = "".join(self._lines), []
            if text:
                self.stream.write(text)
            super().flush()

    def _flush_later(self) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            self.flush()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class JsonStream(io.TextIOBase):
    """Stands for standard error: each line that is written to it becomes a JSON line of `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._rest = ""

    def write(self, text: str) -> int:
        with self._lock:
            # A progress bar ends its states with a carriage return.
            *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
            for line in lines:
                self._write_line(line)
        return len(text)

    def _write_line(self, line: str) -> None:
        """Not through a logger: one whose stream is broken complains to standard error."""
        if line.strip():
            with suppress(OSError, ValueError):
                self._stream.write(json_line(line) + "\n")
                self._stream.flush()

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True


def json_line(line: str, **extra: object) -> str:
    """A line that was not logged, as JSON; one that is JSON already, as it is."""
    if is_json(line):
        return line
    record = {"name": STDERR, "levelno": logging.WARNING, "levelname": "WARNING", "msg": line}
    return JsonFormatter().format(logging.makeLogRecord(record | extra))


def is_json(line: str) -> bool:
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def setup_logging(level: str = "info", log_format: LogFormat = "text", *, gathers: bool = False) -> None:
    """Configure the root logger of this process, and what would go past it. Call once, first. `gathers`: lines of the
    event loop wait for others, for GATHER_SECONDS; of use where nothing holds the loop up."""
    handler = GatheringHandler(sys.stderr) if gathers else logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        # Some libraries have handlers of their own, and some print.
        sys.stderr = JsonStream(sys.stderr)
    else:
        handler.setFormatter(TextFormatter())
    _skip_what_no_line_shows()
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    sys.unraisablehook = _log_unraisable


def _skip_what_no_line_shows() -> None:
    """Threads, processes and places in the code, which logging would find out for each line: a third of its time."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    if sys.version_info >= (3, 12):
        logging.logAsyncioTasks = False
    logging._srcfile = None


def flush_logging() -> None:
    """Before anything is written to standard error that is to stand behind the lines so far."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logger.critical("nobody caught this", exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is None or issubclass(arguments.exc_type, SystemExit):
        return
    name = arguments.thread.name if arguments.thread else "?"
    caught = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
    logger.critical("nobody caught this in thread %s", name, exc_info=caught)


def _log_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    if unraisable.exc_value is None:
        return
    caught = (unraisable.exc_type, unraisable.exc_value, unraisable.exc_traceback)
    what = unraisable.err_msg or "an exception could not be raised"
    logger.error("%s: %r", what, unraisable.object, exc_info=caught)
