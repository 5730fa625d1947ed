"""What an executor and its ranks say to each other, over pipes or between hosts."""

from dataclasses import dataclass

from worker.core.batch import ScheduledBatch
from worker.core.params import Grammar
from worker.runner.config import ModelInfo, RunnerConfig


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs. First message to a process on the executor's host; others know it by themselves."""

    local_rank: int
    """Among the ranks of its host: the number of its device."""
    num_local_ranks: int
    """That share the CPUs of its host."""
    store_host: str
    """Where the ranks of this executor meet, unless its `Setup` says otherwise."""
    store_fd: int | None = None
    """Of the rank that holds the store of all others: a socket that listens there."""
    is_local: bool = False
    """A process of the executor's host, which ends with the executor's."""


@dataclass(frozen=True, slots=True)
class Join:
    """First message of a rank on another host, once each side knows that the other has the secret."""

    rank: int
    world_size: int
    version: str


@dataclass(frozen=True, slots=True)
class Refused:
    """In place of `Setup`: this rank is not wanted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Setup:
    """The executor's first message. After it come `ScheduledBatch`es and what is about grammars, then `Stop`. Rank 0
    alone answers batches, with a `BatchOutput` for each, in their order."""

    config: RunnerConfig
    rank: int
    store_port: int
    """Where the ranks that work together, and no others, meet; 0 with one rank."""
    log_level: str
    log_format: str
    store_host: str | None = None
    """Where that is; None: where the rank's worker is."""


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
class Pulse:
    """The rank's process goes on, whatever its step does. From `Ready` on, every PULSE_SECONDS."""


PULSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Compiled:
    """Answer to the `Compile` with this key, in any order."""

    key: int
    error: str | None
    """What is wrong with the grammar."""


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Record from the next step on; answered with `ProfileDone` once it does."""

    number: int
    path: str
    """Of the trace, on the rank's host."""


@dataclass(frozen=True, slots=True)
class StopProfile:
    """Answered with `ProfileDone` once the trace is written; at once if nothing is recorded."""

    number: int


StepMessage = ScheduledBatch | StartProfile | StopProfile | Stop
"""What the thread that runs steps does, in the order in which it came."""


@dataclass(frozen=True, slots=True)
class ProfileDone:
    """Answer to the message with this number."""

    number: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank ends. `expected`: the message is for the user (a bad model, no memory), not a fault of ours."""

    message: str
    expected: bool
