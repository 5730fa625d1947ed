"""What `GrammarChecks` and a process that checks say to each other."""

from dataclasses import dataclass

from worker.core.params import Grammar


@dataclass(frozen=True, slots=True)
class CheckSetup:
    """First message to a process that checks grammars. After it come `Check`s; each is answered with `Checked`."""

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    parent_pid: int


@dataclass(frozen=True, slots=True)
class Check:
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Checked:
    error: str | None
    """What is wrong with the grammar."""


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """The process cannot check anything, and ends."""

    message: str
