"""The executor: one process per tensor-parallel rank, each with a model runner on its device.

Batches are broadcast to all ranks. Rank 0 answers, and compiles grammars, once a process that may die of them has done
it. Every wait has a timeout, and the end of any rank is noticed at once, because its reply pipe breaks. This process
imports no torch. Nothing has a fixed name or port: two executors on one host do not see each other.
"""

import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from worker.core.batch import BatchOutput, ScheduledBatch
from worker.core.params import Grammar
from worker.grammars.checks import GrammarChecks, Verdict
from worker.grammars.compile_futures import CompileFutures
from worker.processes.messages import encode, receive
from worker.processes.spawn import spawn
from worker.runner.config import ModelInfo, RunnerConfig
from worker.runner.messages import (
    Compile,
    Compiled,
    Failed,
    Keep,
    Ready,
    Release,
    Setup,
    StepDone,
    Stop,
)

logger = logging.getLogger(__name__)

STDERR_TAIL_LINES = 40
STOP_SECONDS = 10.0
SEND_SECONDS = 60.0
"""For a message that another thread sends to the same rank."""


class ExecutorError(Exception):
    """The executor cannot go on; shut it down."""


class ExecutorDiedError(ExecutorError):
    """A rank's process ended or failed. The message has its exit code and the end of its standard error."""


class ExecutorStartError(ExecutorError):
    """The model cannot be served as configured; the message is for the user."""


class ExecutorTimeoutError(ExecutorError):
    """The ranks live, but did not answer in time."""


class Executor:
    """`start`, then any number of `submit` and `collect`, then `shutdown`. One thread at a time may call these;
    `compile` and `release` may be called from any, once it has started."""

    def __init__(
        self,
        config: RunnerConfig,
        *,
        log_level: str = "info",
        log_format: str = "text",
        on_rank_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_rank_end` is called from another thread whenever a rank has ended; `check` says whether that is bad."""
        self._config = config
        self._on_rank_end = on_rank_end
        self._log = (log_level, log_format)
        self._ranks: list[_Rank] = []
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._in_flight: deque[int] = deque()
        self._has_failed = False
        self._compiles = CompileFutures()
        self._grammar_messages: queue.SimpleQueue[Compile | Keep | Release | None] = queue.SimpleQueue()
        self._checks: GrammarChecks | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def start(self, timeout: float = 600.0) -> ModelInfo:
        """Start the ranks and wait until all can run steps; rank 0's report.

        Raises ExecutorStartError, ExecutorDiedError or ExecutorTimeoutError; the ranks are gone then.
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="fissile-")
        rendezvous = str(Path(self._scratch.name) / "ranks")
        size = self._config.tensor_parallel_size
        for rank in range(size):
            setup = Setup(self._config, rank, rendezvous, os.getpid(), *self._log)
            self._ranks.append(_Rank(setup, self._inbox, self._compiles, self._on_rank_end))
        deadline = time.monotonic() + timeout
        ready: dict[int, ModelInfo] = {}
        try:
            while len(ready) < size:
                rank, message = self._next(deadline, "start")
                ready[rank] = message.info
        except ExecutorError:
            self.shutdown()
            raise
        model = ready[0].config
        self._checks = GrammarChecks(self._config.model, model.vocab_size, model.eos_token_ids)
        sender = threading.Thread(
            target=self._send_grammar_messages, args=(self._ranks[0],), name="grammars", daemon=True
        )
        sender.start()
        return ready[0]

    def submit(self, batch: ScheduledBatch) -> None:
        """Queue a step on all ranks; does not wait for earlier ones. Raises ExecutorDiedError."""
        message = encode(batch)
        for rank in self._ranks:
            rank.send(message)
        self._in_flight.append(batch.step)

    def collect(self, timeout: float) -> BatchOutput:
        """The result of the oldest step not collected yet; waits for it.

        Raises ExecutorDiedError or ExecutorTimeoutError.
        """
        if not self._in_flight:
            raise RuntimeError("no step is in flight")
        _, message = self._next(time.monotonic() + timeout, f"answer step {self._in_flight[0]}")
        assert isinstance(message, StepDone)
        expected = self._in_flight.popleft()
        if message.output.step != expected:
            raise ExecutorDiedError(f"rank 0 answered step {message.output.step} in place of step {expected}")
        return message.output

    def check(self) -> None:
        """Raises ExecutorDiedError if a rank ended while no step was in flight. Does not wait."""
        if not self._in_flight and not self._inbox.empty():
            self._next(time.monotonic(), "live")

    def compile(self, grammar: Grammar) -> "Future[None]":
        """Have `grammar` ready for sequences to come, until `release`. Does not wait, not even for a rank that hangs.

        The future raises GrammarError, or another error when the executor ends first or cannot tell.
        """
        assert self._checks is not None
        key, future = self._compiles.add()
        self._grammar_messages.put(Keep(grammar))
        self._checks.check(grammar, partial(self._on_checked, Compile(key, grammar)))
        return future

    def release(self, grammar: Grammar) -> None:
        """Once for each `compile`, when no sequence will use it any more."""
        self._grammar_messages.put(Release(grammar))

    def _on_checked(self, request: Compile, verdict: Verdict) -> None:
        """Rank 0 sees only what a process that may die has compiled."""
        if verdict is None:
            self._grammar_messages.put(request)
        else:
            self._compiles.refuse(request.key, verdict)

    def _send_grammar_messages(self, rank: "_Rank") -> None:
        while (message := self._grammar_messages.get()) is not None:
            try:
                rank.send(encode(message))
            except ExecutorError as error:
                self._compiles.fail(error)

    def shutdown(self) -> None:
        """End all ranks: politely, then by force. Idempotent; never raises because a rank is gone already.

        After a failure by force alone: the others may hang in a collective with the one that is gone.
        """
        self._compiles.fail(ExecutorError("the executor was shut down"))
        self._grammar_messages.put(None)
        if self._checks is not None:
            self._checks.shutdown()
        for rank in self._ranks if not self._has_failed else ():
            rank.request_stop()
        deadline = time.monotonic() + (0 if self._has_failed else STOP_SECONDS)
        for rank in self._ranks:
            rank.end(deadline)
        self._ranks.clear()
        self._in_flight.clear()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _next(self, deadline: float, what: str) -> tuple[int, Any]:
        """The next `Ready` or `StepDone`; anything else is the end, for the other ranks, too."""
        try:
            rank, message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self._has_failed = True
            raise ExecutorTimeoutError(f"the ranks did not {what} in time") from None
        self._has_failed = not isinstance(message, Ready | StepDone)
        if isinstance(message, Failed) and message.expected:
            raise ExecutorStartError(message.message)
        if isinstance(message, Failed):
            raise ExecutorDiedError(f"rank {rank}: {message.message}")
        if message is None:
            raise ExecutorDiedError(self._ranks[rank].epitaph())
        assert isinstance(message, Ready | StepDone)
        return rank, message


class _Rank:
    """One rank's process, and the thread that starts it and hears what it says.

    The process dies with the thread that started it (PR_SET_PDEATHSIG), so that thread must last as long.
    """

    def __init__(
        self,
        setup: Setup,
        inbox: "queue.SimpleQueue[tuple[int, Any]]",
        compiles: CompileFutures,
        on_end: Callable[[], None],
    ) -> None:
        self._setup, self._inbox, self._compiles, self._on_end = setup, inbox, compiles, on_end
        request_end, self._requests = Pipe(duplex=False)
        self._sending = threading.Lock()
        self._replies, reply_end = Pipe(duplex=False)
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self._process: subprocess.Popen[str] | None = None
        name = f"rank-{setup.rank}"
        self._thread = threading.Thread(target=self._serve, args=(request_end, reply_end), name=name, daemon=True)
        self._forwarder = threading.Thread(target=self._forward_stderr, name=f"{name}-stderr", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """From any thread. The rank drains its pipe in a thread of its own, so this does not block for long, unless
        the rank hangs. Raises ExecutorDiedError or ExecutorTimeoutError."""
        if not self._sending.acquire(timeout=SEND_SECONDS):
            raise ExecutorTimeoutError(f"rank {self._setup.rank} does not read what it is sent")
        try:
            self._requests.send_bytes(message)
        except OSError:
            self._thread.join(STOP_SECONDS)
            raise ExecutorDiedError(self.epitaph()) from None
        finally:
            self._sending.release()

    def request_stop(self) -> None:
        """Gives up on a rank that is gone or hangs."""
        if not self._sending.acquire(timeout=STOP_SECONDS):
            return
        try:
            self._requests.send_bytes(encode(Stop()))
        except OSError:
            logger.debug("rank %d is gone already", self._setup.rank)
        finally:
            self._sending.release()

    def end(self, deadline: float) -> None:
        """Wait for the process until `deadline`, then kill it; release its pipes."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and self._process is not None:
            logger.warning("rank %d does not stop; killing it", self._setup.rank)
            self._process.kill()
        self._thread.join()
        with self._sending:  # who is sending has an error by now
            self._requests.close()

    def epitaph(self) -> str:
        """Why the process is no more, as far as can be seen from outside."""
        self._thread.join(STOP_SECONDS)
        code = None if self._process is None else self._process.returncode
        how = "was killed by signal" if code is not None and code < 0 else "ended with exit code"
        tail = "".join(self._stderr_tail) or "(nothing)\n"
        return f"rank {self._setup.rank} {how} {abs(code) if code is not None else '?'}\nIts last words:\n{tail}"

    def _serve(self, request_end: Connection, reply_end: Connection) -> None:
        """Start the process, pass on its messages, and put None into the inbox when it is over."""
        rank = self._setup.rank
        try:
            fds = (request_end.fileno(), reply_end.fileno())
            self._process = spawn("worker.runner.rank", fds, subprocess.PIPE)
            request_end.close()
            reply_end.close()
            self._forwarder.start()
            self._requests.send_bytes(encode(self._setup))
            while True:
                message = receive(self._replies)
                if isinstance(message, Compiled):
                    self._compiles.settle(message.key, message.error)
                else:
                    self._inbox.put((rank, message))
        except (EOFError, OSError):
            if self._process is not None:
                self._process.wait()
                self._forwarder.join(1.0)
        finally:
            self._replies.close()
            self._compiles.fail(ExecutorDiedError(f"rank {rank} has ended"))
            self._inbox.put((rank, None))
            self._on_end()

    def _forward_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        for line in self._process.stderr:
            self._stderr_tail.append(line)
            sys.stderr.write(line)
