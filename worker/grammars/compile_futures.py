"""Compilations of grammars that rank 0 was asked for, by key. Asked by one thread, answered by another."""

import itertools
import threading
from concurrent.futures import Future

from worker.grammars.errors import GrammarError


class CompileFutures:
    """Every future it gives out is settled once: by an answer, or by `fail`."""

    def __init__(self) -> None:
        self._futures: dict[int, Future[None]] = {}
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._failure: Exception | None = None

    def add(self) -> tuple[int, "Future[None]"]:
        """A key to ask with, and what its answer settles: with None, or with GrammarError."""
        future: Future[None] = Future()
        with self._lock:
            key = next(self._keys)
            failure = self._failure
            if failure is None:
                self._futures[key] = future
        if failure is not None:
            future.set_exception(failure)
        return key, future

    def settle(self, key: int, error: str | None) -> None:
        """`error`: what is wrong with the grammar."""
        if error is not None:
            self.refuse(key, GrammarError(error))
        elif future := self._take(key):
            future.set_result(None)

    def refuse(self, key: int, error: Exception) -> None:
        if future := self._take(key):
            future.set_exception(error)

    def _take(self, key: int) -> "Future[None] | None":
        with self._lock:
            future = self._futures.pop(key, None)
        return future if future is not None and future.set_running_or_notify_cancel() else None

    def fail(self, failure: Exception) -> None:
        """No answer will come any more, now or later. Only the first call counts."""
        with self._lock:
            self._failure = self._failure or failure
            futures = list(self._futures.values())
            self._futures.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
