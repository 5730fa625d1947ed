"""Grammars that rank 0 compiles, once a process that may die of them has done it."""

import queue
import threading
from concurrent.futures import Future
from functools import partial

from worker.core.params import Grammar
from worker.executor.errors import ExecutorError
from worker.executor.link import RankLink
from worker.grammars.checks import GrammarChecks, Verdict
from worker.grammars.compile_futures import CompileFutures
from worker.processes.messages import encode
from worker.runner.messages import Compile, Compiled, Keep, Release


class RankGrammars:
    """`attach`, then any number of `compile` and `release`, from any thread, then `shutdown`."""

    def __init__(self) -> None:
        self._compiles = CompileFutures()
        self._messages: queue.SimpleQueue[Compile | Keep | Release | None] = queue.SimpleQueue()
        self._checks: GrammarChecks | None = None

    def attach(self, rank: RankLink, checks: GrammarChecks) -> None:
        """Once rank 0 can run steps."""
        self._checks = checks
        threading.Thread(target=self._send, args=(rank,), name="grammars", daemon=True).start()

    def compile(self, grammar: Grammar) -> "Future[None]":
        """Have `grammar` ready for sequences to come, until `release`. Does not wait, not even for a rank that hangs.

        The future raises GrammarError, or another error when the executor ends first or cannot tell.
        """
        assert self._checks is not None
        key, future = self._compiles.add()
        self._messages.put(Keep(grammar))
        self._checks.check(grammar, partial(self._on_checked, Compile(key, grammar)))
        return future

    def release(self, grammar: Grammar) -> None:
        """Once for each `compile`, when no sequence will use it any more."""
        self._messages.put(Release(grammar))

    def settle(self, answer: Compiled) -> None:
        """What rank 0 has answered."""
        self._compiles.settle(answer.key, answer.error)

    def fail(self, error: ExecutorError) -> None:
        """No answer will come any more."""
        self._compiles.fail(error)

    def shutdown(self) -> None:
        """Idempotent."""
        self._messages.put(None)
        if self._checks is not None:
            self._checks.shutdown()

    def _on_checked(self, request: Compile, verdict: Verdict) -> None:
        if verdict is None:
            self._messages.put(request)
        else:
            self._compiles.refuse(request.key, verdict)

    def _send(self, rank: RankLink) -> None:
        while (message := self._messages.get()) is not None:
            try:
                rank.send(encode(message))
            except ExecutorError as error:
                self._compiles.fail(error)
