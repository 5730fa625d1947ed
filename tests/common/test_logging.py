"""Lines of the log: times with their zone; with JSON every line of the process is an object."""

import asyncio
import io
import json
import logging
import re
import subprocess
import sys
from datetime import datetime

import pytest

from common.logging import GatheringHandler, JsonFormatter, JsonStream, TextFormatter, json_line

EVERYTHING = """
import logging, sys, threading, warnings
from common.logging import setup_logging

setup_logging("info", "json")
logging.getLogger("uvicorn.error").warning("of a library")
logging.getLogger("quiet").debug("not shown")
own = logging.getLogger("transformers")
own.propagate = False
own.addHandler(logging.StreamHandler())
own.warning("by a handler of its own")
warnings.warn("outdated", DeprecationWarning, stacklevel=1)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("mine").exception("with an\\nexception", extra={"request_id": "r"})
thread = threading.Thread(target=lambda: 1 / 0, name="helper")
thread.start()
thread.join()

class Loud:
    def __del__(self):
        raise ValueError("nobody hears")

del [Loud()][0]
print("half a line", end="", file=sys.stderr)
print(" and the rest", file=sys.stderr)
sys.stderr.write("loading 1%\\rloading 100%\\n")
raise RuntimeError("the end")
"""


def run(code):
    ended = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True)
    assert ended.stdout == ""
    return ended.stderr.splitlines()


def test_every_line_is_json():
    entries = [json.loads(line) for line in run(EVERYTHING)]
    assert [(entry["level"], entry["logger"]) for entry in entries] == [
        ("warning", "uvicorn.error"),
        ("warning", "stderr"),
        ("warning", "py.warnings"),
        ("error", "mine"),
        ("critical", "common.logging"),
        ("error", "common.logging"),
        *[("warning", "stderr")] * 3,
        ("critical", "common.logging"),
    ]
    said = [entry["message"] for entry in entries]
    assert said[:2] == ["of a library", "by a handler of its own"]
    assert "DeprecationWarning: outdated" in said[2]
    assert (said[3], entries[3]["request_id"]) == ("with an\nexception", "r")
    assert said[4] == "nobody caught this in thread helper"
    assert said[6:] == ["half a line and the rest", "loading 1%", "loading 100%", "nobody caught this"]
    assert [entry["exception"].splitlines()[-1] for entry in [*entries[3:6], entries[-1]]] == [
        *["ZeroDivisionError: division by zero"] * 2,
        "ValueError: nobody hears",
        "RuntimeError: the end",
    ]


def test_an_exception_that_nobody_caught_has_a_time_in_text_too():
    first, *_, last = run("from common.logging import setup_logging; setup_logging(); raise RuntimeError('the end')")
    assert re.fullmatch(TIME + r" CRITICAL common.logging: nobody caught this", first)
    assert last == "RuntimeError: the end"


TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"


def test_times_are_iso_with_their_zone():
    record = logging.makeLogRecord({"name": "n", "msg": "m", "levelname": "INFO", "created": 1.7e9 + 0.0625})
    (text,) = re.findall(f"^({TIME}) INFO    n: m$", TextFormatter().format(record))
    assert datetime.fromisoformat(text).timestamp() == pytest.approx(1.7e9 + 0.0625, abs=1e-3)
    assert json.loads(JsonFormatter().format(record))["time"] == text


def test_a_line_that_is_json_stays_as_it_is():
    """Lines of a worker's ranks come through its standard error."""
    assert json_line('{"a": 1}') == '{"a": 1}'
    assert [json.loads(json_line(line))["message"] for line in ("{no json", "[1]", '"text"')] == [
        "{no json", "[1]", '"text"',
    ]  # fmt: skip


def test_a_stream_that_broke_raises_nothing():
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    stream = JsonStream(Broken())
    assert stream.write("a\n") == 2
    stream.flush()


class Writes(io.StringIO):
    """What was written at once, each time."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def write(self, text):
        self.texts.append(text)
        return len(text)


@pytest.fixture
def gathering():
    """A logger whose lines are gathered, and what its stream got."""
    own, stream = logging.Logger("gathering"), Writes()
    handler = GatheringHandler(stream)
    own.addHandler(handler)
    yield own, stream.texts
    handler.close()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_lines_of_an_event_loop_are_written_together(gathering):
    own, texts = gathering

    async def scenario():
        for turn in (1, 2):
            own.info("a")
            own.info("b")
            assert len(texts) == turn - 1
            await until(lambda turn=turn: len(texts) == turn)

    asyncio.run(scenario())
    assert texts == ["a\nb\n"] * 2


def test_a_warning_and_a_thread_take_with_them_what_waits(gathering, monkeypatch):
    monkeypatch.setattr("common.logging.GATHER_SECONDS", 60.0)  # a thread may take longer to start than the usual
    own, texts = gathering

    async def scenario():
        own.info("a")
        own.warning("b")
        own.info("c")
        await asyncio.to_thread(own.info, "d")
        own.info("e")

    asyncio.run(scenario())
    assert texts == ["a\nb\n", "c\nd\n"]
    own.info("f")
    assert texts[2:] == ["e\nf\n"]


def test_the_end_of_a_process_leaves_no_line_behind():
    (line,) = run(
        "import asyncio, logging\n"
        "from common.logging import setup_logging\n"
        "setup_logging(gathers=True)\n"
        "async def main(): logging.info('the end')\n"
        "asyncio.run(main())"
    )
    assert line.endswith(" INFO    root: the end")
