"""What an executor and its ranks say to each other over a pair of pipes."""

from dataclasses import dataclass

from worker.core.batch import BatchOutput
from worker.core.params import Grammar
from worker.runner.config import ModelInfo, RunnerConfig


@dataclass(frozen=True, slots=True)
class Setup:
    """First message to a rank. After it come `ScheduledBatch`es and what is about grammars, then `Stop`."""

    config: RunnerConfig
    rank: int
    rendezvous: str
    """Path of a file that the ranks of this executor alone meet through; unused with one rank."""
    parent_pid: int
    log_level: str
    log_format: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what was submitted, then end."""


@dataclass(frozen=True, slots=True)
class Compile:
    """To rank 0 only: have `grammar`, which is known to compile, ready before a sequence needs it."""

    key: int
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Keep:
    """To rank 0 only: open requests use `grammar`; what is compiled of it stays until `Release`."""

    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Release:
    """To rank 0 only, once for each `Keep`."""

    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank can run steps."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class StepDone:
    """From rank 0 only, in the order of the steps; `output.step` names the step."""

    output: BatchOutput


@dataclass(frozen=True, slots=True)
class Compiled:
    """Answer to the `Compile` with this key, in any order."""

    key: int
    error: str | None
    """What is wrong with the grammar."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank ends. `expected`: the message is for the user (a bad model, no memory), not a fault of ours."""

    message: str
    expected: bool
