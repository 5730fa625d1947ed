"""What steps brought, from the engine's thread to the event loop: several steps at a time where they are short.

A message to a router costs the same whether it carries one step or five: gRPC on both sides, a turn of the router's
loop, and a message to each client. So after each delivery there is a pause, as long as what was delivered takes at
`rate` outputs a second, and never longer than `longest` seconds: steps that end meanwhile are delivered together with
the first one after it. (At the end itself, by a timer, there would be more messages, and tokens would wait as long.)
Whatever somebody waits for ends the pause: the first token of a sequence, its ending, a refusal.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from worker.core.outputs import SequenceOutput
from worker.engine.engine import StepReport

MAX_PAUSE_SECONDS = 0.05
"""A router looks for stop strings in what it has: what is generated after one meanwhile is in vain."""
MAX_PAUSE_SECONDS_ON_CPU = 0.075
"""Where the model runs on the same cores, so that each message makes steps longer."""
LATE_STEPS = 2.0
"""What waits at the end of a pause waits for the next step, unless that takes so many times the last one."""
OUTPUTS_PER_MESSAGE = 16
"""That cost as much as the message that they are in."""
MAX_RATE = 12_000.0
"""Outputs a second: a third of what one core can do."""
RATE_PER_CORE = 200.0
"""Where the model runs on the same cores, which each message takes from it in three processes: on two, 10 to 13 a
second with one sequence as with many, about as many as a router passes on to each of eight clients."""


def output_rate(asked: float | None, device: str, num_cores: int) -> float:
    """Outputs a second; `asked` wins. `num_cores` are the model's, if its `device` is the CPU."""
    if asked is not None:
        return asked
    return min(MAX_RATE, RATE_PER_CORE * num_cores) if device == "cpu" else MAX_RATE


def longest_pause(device: str) -> float:
    """Seconds, where the model runs on `device`."""
    return MAX_PAUSE_SECONDS_ON_CPU if device == "cpu" else MAX_PAUSE_SECONDS


class Reports:
    """`post` from the engine's thread; everything else on the loop."""

    def __init__(self, deliver: Callable[[Sequence[StepReport]], None], *, rate: float, longest: float) -> None:
        """`deliver` is called on the loop that runs now, with one report or more, each exactly once and in order.
        `rate` is in outputs a second, the `longest` pause in seconds."""
        self._deliver = deliver
        self._rate, self._longest = rate, longest
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[StepReport] = []
        self._pause_ends = 0.0
        """By the loop's clock. Until then, only what is urgent wakes the loop."""
        self._late: asyncio.TimerHandle | None = None
        """For what waits at the end of a pause, if the step that runs is a long one."""

    def post(self, report: StepReport) -> None:
        with self._lock:
            self._waiting.append(report)
        if report.is_urgent or self._loop.time() >= self._pause_ends:
            with suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Deliver what waits, if anything does."""
        with self._lock:
            reports, self._waiting = self._waiting, []
        if reports:
            self._begin_pause(reports)
            self._deliver(reports)

    def _begin_pause(self, reports: Sequence[StepReport]) -> None:
        if self._late is not None:
            self._late.cancel()
        num_outputs = sum(len(report.outputs) for report in reports)
        finished = reports[-1].finished
        self._pause_ends = self._loop.time() + min(self._longest, (OUTPUTS_PER_MESSAGE + num_outputs) / self._rate)
        grace = LATE_STEPS * finished.step_seconds if finished else 0.0
        self._late = self._loop.call_at(self._pause_ends + min(grace, self._longest), self._be_late)

    def _be_late(self) -> None:
        self._pause_ends = 0.0  # though the loop's clock may be a little before it still
        self.flush()


def joined_outputs(reports: Sequence[StepReport]) -> list[SequenceOutput]:
    """Of all of them, with one output for each sequence, but for log probabilities of its prompt. Takes them over."""
    if len(reports) == 1:
        return reports[0].outputs
    joined: list[SequenceOutput] = []
    last: dict[int, int] = {}
    """Sequence → place of its last output."""
    for report in reports:
        for output in report.outputs:
            at = last.get(output.sequence_id)
            if at is None or joined[at].prompt_logprobs is not None or output.prompt_logprobs is not None:
                last[output.sequence_id] = len(joined)
                joined.append(output)
            else:
                output.prepend(joined[at])
                joined[at] = output
    return joined
