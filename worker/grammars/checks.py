"""Grammars are compiled in a process that may die of them, before rank 0 compiles them, which may not."""

import hashlib
import logging
import os
import queue
import signal
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from typing import Any

from worker.core.params import Grammar
from worker.grammars.check_messages import Check, Checked, CheckFailed, CheckSetup
from worker.grammars.errors import GrammarError
from worker.processes.messages import receive, send
from worker.processes.spawn import spawn

logger = logging.getLogger(__name__)

NUM_PROCESSES = 2
"""A slow grammar does not hold up the others."""
ANSWER_SECONDS = 60.0
"""On the clock: for a process that starts, or hangs. What a grammar may take is counted in processor time."""
MAX_VERDICTS = 1024
"""Grammars whose verdict is remembered."""
_DEATHS = {
    signal.SIGPROF: "it takes too long to compile",
    signal.SIGSEGV: "it is nested too deeply",
    signal.SIGBUS: "it is nested too deeply",
    signal.SIGABRT: "it takes too much memory to compile",
}

Verdict = Exception | None
"""None: it compiles. GrammarError: it does not. Another: nobody knows."""


class CheckFailedError(Exception):
    """The process that checks grammars does not work."""


@dataclass(frozen=True, slots=True)
class _Job:
    grammar: Grammar
    on_verdict: Callable[[Verdict], None]


class GrammarChecks:
    """`check` may be called from any thread; `shutdown` once, after which nobody answers. The processes start with the
    first grammar; one that dies is replaced at once."""

    def __init__(self, model: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._setup = CheckSetup(model, vocab_size, eos_token_ids, os.getpid())
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._verdicts = _Verdicts()
        self._threads = [
            threading.Thread(target=self._serve, name=f"grammar-check-{i}", daemon=True) for i in range(NUM_PROCESSES)
        ]
        for thread in self._threads:
            thread.start()

    def check(self, grammar: Grammar, on_verdict: Callable[[Verdict], None]) -> None:
        """`on_verdict` is called once, from another thread or from this one."""
        known = self._verdicts.get(grammar)
        if known is None:
            self._jobs.put(_Job(grammar, on_verdict))
        else:
            on_verdict(known.verdict)

    def shutdown(self) -> None:
        """Does not wait."""
        for _ in self._threads:
            self._jobs.put(None)

    def _serve(self) -> None:
        """The process dies with the thread that started it (PR_SET_PDEATHSIG): this one."""
        process: _Process | None = None
        while (job := self._jobs.get()) is not None:
            known = self._verdicts.get(job.grammar)
            if known is not None:
                job.on_verdict(known.verdict)
                continue
            process = process or _Process(self._setup)
            verdict = process.check(job.grammar)
            if isinstance(verdict, GrammarError | None):
                self._verdicts.add(job.grammar, _Known(verdict))
            if process.has_ended:
                logger.warning("a process that checks grammars ended: %s", verdict)
                process = _Process(self._setup)
            job.on_verdict(verdict)
        if process is not None:
            process.end()


class _Process:
    """A process of `worker.grammars.check_process`, of use as long as it has not ended."""

    def __init__(self, setup: CheckSetup) -> None:
        request_end, self._requests = Pipe(duplex=False)
        self._replies, reply_end = Pipe(duplex=False)
        with request_end, reply_end:
            # What the library writes when it fails is about the client's text.
            fds = (request_end.fileno(), reply_end.fileno())
            self._process = spawn("worker.grammars.check_process", fds, subprocess.DEVNULL, fds)
        self.has_ended = False
        self._send(setup)

    def check(self, grammar: Grammar) -> Verdict:
        self._send(Check(grammar))
        try:
            if not self._replies.poll(ANSWER_SECONDS):
                self.end()
                return GrammarError("it takes too long to compile")
            answer = receive(self._replies)
        except (EOFError, OSError):
            self.end()
            return _cause_of_death(self._process.returncode)
        if isinstance(answer, CheckFailed):
            self.end()
            return CheckFailedError(answer.message)
        assert isinstance(answer, Checked)
        return None if answer.error is None else GrammarError(answer.error)

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # it has ended: seen when its answer is read
            send(self._requests, message)

    def end(self) -> None:
        self.has_ended = True
        self._requests.close()
        self._replies.close()
        self._process.kill()
        self._process.wait()


def _cause_of_death(exit_code: int) -> Verdict:
    reason = _DEATHS.get(signal.Signals(-exit_code)) if exit_code < 0 else None
    return GrammarError(reason) if reason else CheckFailedError(f"exit code {exit_code}")


@dataclass(frozen=True, slots=True)
class _Known:
    verdict: GrammarError | None


class _Verdicts:
    """Of the grammars asked for last, by a digest: texts may be long. For any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, grammar: Grammar) -> _Known | None:
        key = _digest(grammar)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
            return known

    def add(self, grammar: Grammar, known: _Known) -> None:
        with self._lock:
            self._known[_digest(grammar)] = known
            if len(self._known) > MAX_VERDICTS:
                self._known.popitem(last=False)


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind.value}:{grammar.text}".encode()).digest()
