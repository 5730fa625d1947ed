"""Ranks that agree on their steps: nobody runs ahead, nobody hangs, nobody is awake for nothing."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from tests.runner.thread_ranks import run_ranks
from worker.core.batch import ScheduledBatch
from worker.core.tokens import token_array
from worker.kernels.step import Round
from worker.parallel.group import Group
from worker.runner.lockstep import Alarm, Answered, Inbox, Lockstep, Turn
from worker.runner.messages import StartProfile, Stop, StopProfile


def batch(step: int, lens: list[int], *, is_dummy: bool = False) -> ScheduledBatch:
    return ScheduledBatch(
        step=step, slots=list(range(len(lens))), num_scheduled_tokens=lens, num_computed_tokens=[0] * len(lens),
        input_ids=token_array([0] * sum(lens)), samples=[True] * len(lens), is_dummy=is_dummy,
    )  # fmt: skip


def dummy(_: Round) -> ScheduledBatch:
    return batch(0, [1], is_dummy=True)


@dataclass
class Rank:
    """One that notes what it is to do, and answers its steps at once."""

    inbox: Inbox = field(default_factory=SimpleQueue)
    turns: list[Turn] = field(default_factory=list)
    num_done: int = 0
    has_done: threading.Condition = field(default_factory=threading.Condition)

    def run(self, lockstep: Lockstep) -> None:
        for turn in lockstep.turns():
            self.turns.append(turn)
            if isinstance(turn.message, ScheduledBatch) and not turn.message.is_dummy:
                self.inbox.put(Answered())
                with self.has_done:
                    self.num_done += 1
                    self.has_done.notify_all()

    def wait_for(self, num_steps: int) -> None:
        with self.has_done:
            assert self.has_done.wait_for(lambda: self.num_done >= num_steps, 20)

    @property
    def batches(self) -> list[ScheduledBatch]:
        return [turn.message for turn in self.turns if isinstance(turn.message, ScheduledBatch)]

    @property
    def own(self) -> list[int]:
        return [one.step for one in self.batches if not one.is_dummy]


class Ranks:
    """`num_dp` workers of `num_tp` ranks each."""

    def __init__(self, num_dp: int, num_tp: int) -> None:
        self.num_tp = num_tp
        self.all = [Rank() for _ in range(num_dp * num_tp)]
        self.num_agreed = [0] * len(self.all)

    def of(self, worker: int) -> list[Rank]:
        return self.all[worker * self.num_tp : (worker + 1) * self.num_tp]

    def send(self, worker: int, message: ScheduledBatch | Stop | StartProfile | StopProfile) -> None:
        for rank in self.of(worker):
            rank.inbox.put(message)

    def stop(self) -> None:
        for rank in self.all:
            rank.inbox.put(Stop())

    def run(self, scenario: Callable[[], None]) -> None:
        """`scenario`, while the ranks run; all must have ended after it."""
        acting = threading.Thread(target=scenario)

        def work(number: int, handle: dist.ProcessGroup, store: Store) -> None:
            rank = self.all[number]
            lost: list[str] = []
            alarm = Alarm(store, number, rank.inbox, lost.append)
            control = _Counting(number, len(self.all), handle)
            rank.run(Lockstep(rank.inbox, control, self.num_tp, alarm, dummy))
            self.num_agreed[number] = len(control.calls)
            assert not lost

        acting.start()
        run_ranks(len(self.all), work)
        acting.join()
        # All made steps of the same rounds, in the same order.
        rounds = [[turn.together for turn in rank.turns if turn.together] for rank in self.all]
        assert all(mine == rounds[0] for mine in rounds)
        for worker in range(len(self.all) // self.num_tp):
            assert len({tuple(rank.own) for rank in self.of(worker)}) == 1


@dataclass(frozen=True)
class _Counting(Group):
    calls: list[None] = field(default_factory=list)

    def all_gather(self, x):
        self.calls.append(None)
        return super().all_gather(x)


def test_who_has_nothing_to_do_makes_dummy_steps_beside_the_others() -> None:
    ranks = Ranks(2, 1)

    def scenario() -> None:
        for step in range(5):
            ranks.send(1, batch(step, [3, 1]))
        ranks.all[1].wait_for(5)
        ranks.stop()

    ranks.run(scenario)
    idle, busy = ranks.all
    assert busy.own == [0, 1, 2, 3, 4] and idle.own == []
    assert len(idle.batches) == 5
    assert {turn.together for turn in idle.turns} == {Round(4, False)}


def test_the_round_is_as_large_as_its_largest_step() -> None:
    ranks = Ranks(3, 1)

    def scenario() -> None:
        for worker, lens in enumerate(([1] * 7, [1, 1])):
            ranks.send(worker, batch(0, lens))
        for rank in ranks.all[:2]:
            rank.wait_for(1)
        ranks.stop()

    ranks.run(scenario)
    # Two may have met in one round or, if one was late, have made two.
    rounds = [turn.together for turn in ranks.all[2].turns]
    assert rounds in ([Round(7, True)], [Round(7, True), Round(2, True)], [Round(2, True), Round(7, True)])


def test_the_round_has_the_drafts_of_those_that_have_most() -> None:
    ranks = Ranks(2, 1)

    def scenario() -> None:
        ranks.send(1, batch(0, [3, 4, 1])._replace(num_draft_tokens={0: 2, 1: 3}))
        ranks.all[1].wait_for(1)
        ranks.stop()

    ranks.run(scenario)
    assert [turn.together for turn in ranks.all[0].turns] == [Round(8, False, num_drafts=3, num_drafted_rows=2)]


def test_a_worker_runs_a_batch_once_all_its_ranks_have_it() -> None:
    ranks = Ranks(2, 2)
    first, second = ranks.of(0)

    def scenario() -> None:
        first.inbox.put(batch(0, [1]))
        ranks.send(1, batch(0, [1]))
        for rank in ranks.of(1):
            rank.wait_for(1)
        assert first.own == []
        second.inbox.put(batch(0, [1]))
        for rank in ranks.of(0):
            rank.wait_for(1)
        ranks.stop()

    ranks.run(scenario)
    assert [one.is_dummy for one in first.batches] == [True, False]


def test_ranks_without_work_are_asleep() -> None:
    ranks = Ranks(2, 2)

    def scenario() -> None:
        for step in range(3):
            time.sleep(0.1)
            ranks.send(step % 2, batch(step, [1]))
            ranks.of(step % 2)[0].wait_for(step // 2 + 1)
        time.sleep(0.1)
        ranks.stop()

    ranks.run(scenario)
    # A sleep costs one round, as does each step, and being told to stop; what is on its way to a rank may cost some.
    assert max(ranks.num_agreed) < 40


def test_profiles_are_each_worker_s_own_and_wake_nobody() -> None:
    ranks = Ranks(2, 1)

    def scenario() -> None:
        ranks.send(0, StartProfile(1, "trace"))
        ranks.send(0, batch(0, [1]))
        ranks.send(0, StopProfile(2))
        ranks.all[0].wait_for(1)
        ranks.stop()

    ranks.run(scenario)
    kinds = [type(turn.message) for turn in ranks.all[0].turns]
    assert kinds == [StartProfile, ScheduledBatch, StopProfile]
    assert len(ranks.all[1].turns) == 1


def test_all_stop_together() -> None:
    """One that is told goes on for the others until they are told, too."""
    ranks = Ranks(2, 1)

    def scenario() -> None:
        ranks.send(0, Stop())
        time.sleep(0.05)
        for step in range(3):
            ranks.send(1, batch(step, [1]))
        ranks.all[1].wait_for(3)
        ranks.send(1, Stop())

    ranks.run(scenario)
    assert [one.is_dummy for one in ranks.all[0].batches] == [True] * 3
    assert ranks.num_agreed[0] < 15, "it was not awake while there was nothing to do"


@pytest.mark.parametrize(("num_dp", "num_tp"), [(2, 1), (4, 1), (2, 2)])
def test_random_work(num_dp: int, num_tp: int, is_soak: bool) -> None:
    """Engines that send a step, or some behind each other, or nothing for a while; ranks are late now and then."""
    ranks = Ranks(num_dp, num_tp)
    num_steps = 2000 if is_soak else 200

    def engine(worker: int) -> None:
        draw = random.Random(worker)
        for step in range(num_steps):
            for rank in draw.sample(ranks.of(worker), num_tp):
                rank.inbox.put(batch(step, [draw.randint(1, 5)] if num_tp == 1 else [1]))
                if draw.random() < 0.02:
                    time.sleep(0.002)
            depth = draw.choice((0, 1, 1, 1))
            for rank in ranks.of(worker):
                rank.wait_for(step + 1 - depth)
            if draw.random() < 0.05:
                time.sleep(draw.choice((0.0, 0.001, 0.004, 0.02)))

    def scenario() -> None:
        engines = [threading.Thread(target=engine, args=(worker,)) for worker in range(num_dp)]
        for one in engines:
            one.start()
        for one in engines:
            one.join()
        ranks.stop()

    ranks.run(scenario)
    assert all(rank.own == list(range(num_steps)) for rank in ranks.all)
