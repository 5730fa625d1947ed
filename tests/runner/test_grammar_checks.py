"""Grammars that a process may die of: with real processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.runner.byte_tokenizer import EOS, VOCAB_SIZE, make_compiler, save_byte_model
from worker.core.params import Grammar, GrammarKind
from worker.grammars import check_process
from worker.grammars import checks as module
from worker.grammars.checks import CheckFailedError, GrammarChecks, Verdict
from worker.grammars.errors import GrammarError

WAIT = 60.0


class Checks:
    def __init__(self, model: Path) -> None:
        self.checks = GrammarChecks(str(model), VOCAB_SIZE, (EOS,))

    def __call__(self, text: str, kind: GrammarKind = GrammarKind.REGEX) -> Verdict:
        verdicts: SimpleQueue[Verdict] = SimpleQueue()
        self.checks.check(Grammar(kind, text), verdicts.put)
        return verdicts.get(timeout=WAIT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_byte_model(path)
    return path


@pytest.fixture
def check(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    monkeypatch.setattr(module, "NUM_PROCESSES", 1)
    made = Checks(model)
    yield made
    made.checks.shutdown()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the processes that were started."""
    pids: list[int] = []
    spawn = module.spawn

    def spawn_and_note(*arguments):
        process = spawn(*arguments)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(module, "spawn", spawn_and_note)
    return pids


def refused(verdict: Verdict) -> str:
    assert isinstance(verdict, GrammarError)
    return str(verdict)


def test_one_process_says_what_compiles_and_what_does_not(check, started):
    assert check("[0-9]+") is None
    assert "unclosed group" in refused(check("("))
    assert "nested too deeply" in refused(check("[" * 5000, GrammarKind.JSON_SCHEMA))
    assert check("[a-z]+") is None
    assert len(started) == 1


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(check, started):
    """40 kB, and seconds for the library. The verdict is remembered: the second time costs nothing."""
    verdict = refused(check("a?" * 20_000))
    assert verdict in ("it takes too long to compile", "it takes too much memory to compile")
    assert refused(check("a?" * 20_000)) == verdict
    assert check("x") is None
    assert len(started) == 2


def test_masks_that_take_too_long_are_refused(monkeypatch):
    """A step would wait for them."""
    matcher = make_compiler().build(Grammar(GrammarKind.REGEX, "[a-z]*"))
    check_process._try(matcher.deep_copy())
    monkeypatch.setattr(check_process, "MAX_MASK_SECONDS", 0)
    with pytest.raises(GrammarError, match="takes too long"):
        check_process._try(matcher)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGSEGV, "nested too deeply"), (signal.SIGABRT, "too much memory")]
)
def test_a_process_that_dies_is_replaced(check, started, number, words):
    assert check("x") is None
    os.kill(started[0], number)
    assert words in refused(check("y"))
    assert check("z") is None
    assert len(started) == 2


def test_a_process_that_was_killed_from_outside_blames_no_grammar(check, started):
    assert check("x") is None
    os.kill(started[0], signal.SIGKILL)
    assert isinstance(check("y"), CheckFailedError)
    assert check("y") is None


def test_a_process_that_hangs_is_replaced(check, started, monkeypatch):
    assert check("x") is None
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    os.kill(started[0], signal.SIGSTOP)
    assert refused(check("y")) == "it takes too long to compile"
    monkeypatch.setattr(module, "ANSWER_SECONDS", WAIT)
    assert check("z") is None


def test_a_model_without_a_tokenizer_is_not_the_grammars_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "NUM_PROCESSES", 1)
    check = Checks(tmp_path)
    assert isinstance(check("x"), CheckFailedError | GrammarError)
    check.checks.shutdown()
