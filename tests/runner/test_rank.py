"""How a rank's steps are answered where the device works on after `submit`, which on a CPU it never does."""

import threading

from worker.core.batch import ScheduledBatch
from worker.core.tokens import token_array
from worker.runner.pending import PendingStep
from worker.runner.rank import _thread_for
from worker.runner.timer import CpuTiming


def pending_step(number: int) -> PendingStep:
    batch = ScheduledBatch(number, [0], [1], [0], token_array([1]), [True])
    return PendingStep(batch, [0], CpuTiming())


def test_a_thread_answers_steps_in_their_order_and_all_before_it_ends() -> None:
    answered: list[tuple[int, str]] = []
    may_begin = threading.Event()

    def answer(step: PendingStep) -> None:
        may_begin.wait(10)
        answered.append((step.batch.step, threading.current_thread().name))

    with _thread_for(answer) as take:
        for number in range(20):
            take(pending_step(number))  # does not wait
        may_begin.set()
    assert answered == [(number, "replies") for number in range(20)]
