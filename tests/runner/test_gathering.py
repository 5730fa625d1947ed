"""Rows that ranks write into rank 0's memory: who waits for whom, and what is where."""

import threading
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from worker.parallel.gathering import MAX_ROWS, Gathering
from worker.parallel.group import Group
from worker.parallel.symmetric import SymmetricSums

SECONDS = 20.0


class Wires:
    """A place for one signal from each rank to each other one."""

    def __init__(self, size: int) -> None:
        self.is_set = [[False] * size for _ in range(size)]
        self.changed = threading.Condition()

    def flip(self, source: int, target: int, *, to: bool) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.is_set[source][target] != to, SECONDS)
            self.is_set[source][target] = to
            self.changed.notify_all()


@dataclass
class Signals:
    """Those of one rank, whose device works while the host waits."""

    wires: Wires
    rank: int

    def put_signal(self, rank: int, /) -> None:
        self.wires.flip(self.rank, rank, to=True)

    def wait_signal(self, rank: int, /) -> None:
        self.wires.flip(rank, self.rank, to=False)


def groups_of(size: int, memory: Tensor) -> list[Group]:
    wires = Wires(size)
    return [
        Group(
            rank, size, None,
            SymmetricSums(torch.empty(0), torch.zeros_like, None,
                          Gathering(memory, memory, Signals(wires, rank), rank, size)),
        )
        for rank in range(size)
    ]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_all_ranks_come_together_again_and_again(size: int) -> None:
    """However late a rank is, none writes over what rank 0 still reads, and rank 0 reads nothing that is not there."""
    groups, num_turns = groups_of(size, torch.zeros(4096, dtype=torch.uint8)), 50
    found: list[Tensor] = []

    def work(group: Group) -> None:
        for turn in range(num_turns):
            place = group.gather_place(3, 4, torch.float32)
            assert place is not None
            place.fill_(turn * 10 + group.rank)
            rows = group.gather_last(place)
            assert (rows is None) == (group.rank > 0)
            if rows is not None:
                found.append(rows.clone())

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for turn, rows in enumerate(found):
        expected = torch.arange(size).repeat_interleave(4) + turn * 10.0
        assert torch.equal(rows, expected.expand(3, -1)), turn
    assert len(found) == num_turns


@pytest.mark.parametrize(("num_rows", "width"), [(0, 4), (MAX_ROWS + 1, 4), (4, 129), (MAX_ROWS, 16)])
def test_what_has_no_room_asks_nobody(num_rows: int, width: int) -> None:
    groups = groups_of(2, torch.zeros(4096, dtype=torch.uint8))
    for group in groups:
        assert group.gather_place(num_rows, width, torch.float32) is None


def test_one_rank_has_no_place() -> None:
    assert Group().gather_place(3, 4, torch.float32) is None
