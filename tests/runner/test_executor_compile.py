"""Compiling through an executor with real processes: every future is settled, whatever becomes of the ranks."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner.byte_tokenizer import save_byte_model
from tests.runner.conftest import random_prompt
from tests.runner.executors import WAIT, alive, driver_of, rank_pid, tiny_config
from worker.core.params import Grammar, GrammarKind
from worker.executor import link as module
from worker.executor.errors import ExecutorDiedError, ExecutorError
from worker.executor.executor import Executor
from worker.grammars.errors import GrammarError

GOOD = Grammar(GrammarKind.REGEX, "[0-9]+")
BAD = Grammar(GrammarKind.REGEX, "(")
LARGE = Grammar(GrammarKind.REGEX, "a" * 500_000)
"""More than a pipe takes while nobody reads."""


@pytest.fixture(scope="session")
def tiny_with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-with-tokenizer")
    save_byte_model(path)
    return path


@pytest.fixture
def executor(tiny_with_tokenizer: Path) -> Iterator[Executor]:
    made = Executor(tiny_config(tiny_with_tokenizer))
    made.start(WAIT)
    yield made
    made.shutdown()


def test_grammars_are_compiled_while_steps_run(executor: Executor) -> None:
    driver = driver_of(executor)
    seq = driver.add(random_prompt(10, 1))
    executor.submit(driver.batch([(seq, 10)]))
    futures = [executor.grammars.compile(grammar) for grammar in (GOOD, BAD, GOOD)]
    assert executor.collect(WAIT).step == 0
    assert futures[0].result(WAIT) is None
    assert futures[2].result(WAIT) is None
    with pytest.raises(GrammarError, match="unclosed group"):
        futures[1].result(WAIT)


def test_rank_that_is_killed_fails_what_is_compiled_and_what_comes_later(executor: Executor) -> None:
    os.kill(rank_pid(executor), signal.SIGSTOP)
    futures = [executor.grammars.compile(grammar) for grammar in (GOOD, LARGE)]
    assert not futures[0].done()
    os.kill(rank_pid(executor), signal.SIGKILL)
    for future in (*futures, executor.grammars.compile(GOOD)):
        with pytest.raises(ExecutorDiedError):
            future.result(WAIT)


def test_compile_does_not_wait_for_a_rank_that_hangs_and_shutdown_ends_it(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.2)
    pid = rank_pid(executor)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    futures = [executor.grammars.compile(LARGE) for _ in range(3)]
    assert time.monotonic() - begin < 1
    executor.shutdown()
    assert not alive(pid)
    for future in futures:
        with pytest.raises(ExecutorError):
            future.result(WAIT)


def test_compile_after_shutdown_fails(executor: Executor) -> None:
    executor.shutdown()
    with pytest.raises(ExecutorError):
        executor.grammars.compile(GOOD).result(WAIT)


def test_future_that_nobody_wants_any_more(executor: Executor) -> None:
    os.kill(rank_pid(executor), signal.SIGSTOP)
    future = executor.grammars.compile(GOOD)
    assert future.cancel()
    os.kill(rank_pid(executor), signal.SIGCONT)
    assert executor.grammars.compile(GOOD).result(WAIT) is None
