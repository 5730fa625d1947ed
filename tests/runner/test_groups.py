"""Sums over ranks: which go through symmetric memory, where the result is, and when it is not used at all."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runner.conftest import greedy_reference, random_prompt
from tests.runner.driver import Driver
from worker.parallel import symmetric as module
from worker.parallel.group import Group
from worker.parallel.symmetric import Inboxes, Peers, SymmetricSums, symmetric_sums
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

CUDA = torch.device("cuda")


def sums_of_equal_ranks(part: Tensor) -> None:
    """As if the other of two ranks had the same numbers."""
    part.mul_(2)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Of two ranks, where NCCL multiplies by a thousand: the tests see who did it."""
    monkeypatch.setattr(dist, "all_reduce", lambda x, group=None: x.mul_(1000))
    return Group(0, 2, None, SymmetricSums(torch.zeros(2048, dtype=torch.uint8), sums_of_equal_ranks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_sum_goes_through_symmetric_memory(group: Group, dtype: torch.dtype) -> None:
    x = torch.arange(32, dtype=dtype).view(4, 8)
    assert torch.equal(group.all_reduce(x), x * 2)


def test_a_part_that_was_written_in_its_place_is_not_copied(group: Group) -> None:
    part = group.place(4, 8, dtype=torch.float32)
    assert part is not None
    part.fill_(3)
    assert group.all_reduce(part) is part
    assert torch.equal(part, torch.full((4, 8), 6.0))


def test_a_sum_lasts_while_the_next_part_is_written(group: Group) -> None:
    total = group.all_reduce(torch.ones(4, 8))
    parts = [group.place(4, 8, dtype=torch.float32) for _ in range(2)]
    assert parts[0] is not None and parts[1] is not None
    parts[0].fill_(5)
    assert torch.equal(total, torch.full((4, 8), 2.0))
    assert parts[1].data_ptr() == total.data_ptr()


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(257),  # larger than the buffer
        torch.ones(3),  # no multiple of 16 bytes
        torch.ones(0),
        torch.ones(8, dtype=torch.float16),  # what the operation does not add up
    ],
)
def test_the_library_takes_all_other_sums(group: Group, x: Tensor) -> None:
    x = x.clone()
    assert torch.equal(group.all_reduce(x), torch.full_like(x, 1000))


def test_one_rank_has_nothing_to_add_up() -> None:
    x = torch.ones(8)
    assert Group().all_reduce(x) is x
    assert Group().place(8, dtype=torch.float32) is None


def test_ranks_on_cpus_have_no_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_all_agree", None)  # and do not talk about it
    assert symmetric_sums(TwoRanks(), torch.device("cpu"), is_one_host=True) is None  # type: ignore[arg-type]


class Alone(Group):
    """One rank, which holds all weights, and takes its sums through symmetric memory nevertheless."""

    def all_reduce(self, x: Tensor) -> Tensor:
        assert self.symmetric is not None
        total = self.symmetric.all_reduce(x)
        assert total is not None
        return total


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((64, 8192), torch.bfloat16, True),
        ((1, 4096), torch.float32, True),
        ((65, 64), torch.bfloat16, False),
        ((0, 64), torch.bfloat16, False),
        ((1, 8194), torch.bfloat16, False),
        ((1, 33), torch.bfloat16, False),
    ],
)
def test_inboxes_hold_rows_of_their_size(shape: tuple[int, int], dtype: torch.dtype, expected: bool) -> None:
    assert Inboxes.of(torch.empty(0), [0, 0], 0).hold(torch.empty(shape, dtype=dtype)) == expected


def test_what_was_sent_is_taken_by_a_norm_before_anything_else_is_sent_or_added_up() -> None:
    inboxes = Inboxes.of(torch.empty(0), [0, 0], 0)
    group = Group(0, 2, None, SymmetricSums(torch.zeros(2048, dtype=torch.uint8), sums_of_equal_ranks, inboxes))
    part, other = torch.ones(4, 8), torch.ones(4, 8)
    assert inboxes.keep(part) is part
    for x in (part, other):
        with pytest.raises(AssertionError):
            group.all_reduce(x)
    with pytest.raises(AssertionError):
        inboxes.keep(other)
    assert inboxes.take(part)
    assert not inboxes.take(other)
    assert torch.equal(group.all_reduce(other), torch.full((4, 8), 2.0))


def test_parts_are_read_where_they_are_once_all_ranks_have_met() -> None:
    meetings: list[int] = []
    peers = Peers(torch.tensor([7, 8]), lambda: meetings.append(1))
    sums = SymmetricSums(torch.zeros(2048, dtype=torch.uint8), sums_of_equal_ranks, peers=peers)
    group = Group(0, 2, None, sums)
    first, second = (group.place(4, 8, dtype=torch.float32) for _ in range(2))
    assert first is not None and second is not None
    assert group.parts(torch.ones(4, 8)) is None and not meetings
    found = group.parts(first), group.parts(second)
    assert [parts is not None and parts.offset for parts in found] == [1024, 0]
    assert len(meetings) == 2
    assert Group().parts(first) is None


def test_a_model_keeps_nothing_where_sums_go(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    """Each sum poisons all else that is there, the sum before it among that."""
    buffer = torch.full((1 << 20,), 255, dtype=torch.uint8)
    sums = []

    def add_up(part: Tensor) -> None:
        total = part.clone()
        buffer.fill_(255)  # not a number
        part.copy_(total)
        sums.append(part.data_ptr())

    group = Alone(symmetric=SymmetricSums(buffer, add_up))
    config = RunnerConfig(model=str(tiny[0]), device="cpu", num_blocks=64, max_num_seqs=16)
    runner, info = build_runner(config, group)
    sums.clear()
    driver = Driver(runner, info.num_blocks, info.block_size)
    seqs = [driver.add(random_prompt(n, n)) for n in (5, 33)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=15)
    for seq in seqs:
        assert seq.output == greedy_reference(tiny[1], seq.tokens[: seq.num_prompt], 16)
    assert len(sums) == 16 * (2 * tiny[1].config.num_hidden_layers + 1), "two a layer and the embedding's"


class TwoRanks:
    """In the place of a process group."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("is_one_host", "see_each_other", "has_memory", "is_right", "expected"),
    [
        (True, True, True, True, True),
        (False, True, True, True, False),
        (True, False, True, True, False),
        (True, True, False, True, False),
        (True, True, True, False, False),
    ],
)
def test_symmetric_memory_is_used_where_all_of_it_works(
    monkeypatch: pytest.MonkeyPatch,
    is_one_host: bool, see_each_other: bool, has_memory: bool, is_right: bool, expected: bool,
) -> None:  # fmt: skip
    sums = SymmetricSums(torch.zeros(64, dtype=torch.uint8), sums_of_equal_ranks)

    def allocate(*_: object) -> SymmetricSums:
        if not has_memory:
            raise RuntimeError("no memory")
        return sums

    monkeypatch.setattr(module, "_all_agree", lambda flag, *_: flag)
    monkeypatch.setattr(module, "_all_see_each_other", lambda _: see_each_other)
    monkeypatch.setattr(module, "_allocate", allocate)
    monkeypatch.setattr(module, "_is_right", lambda *_: is_right)
    found = symmetric_sums(TwoRanks(), CUDA, is_one_host=is_one_host)  # type: ignore[arg-type]
    assert found is (sums if expected else None)


def test_one_rank_that_cannot_keeps_all_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_all_see_each_other", lambda _: True)
    monkeypatch.setattr(module, "_all_agree", lambda *_: False)
    monkeypatch.setattr(module, "_allocate", None)
    assert symmetric_sums(TwoRanks(), CUDA, is_one_host=True) is None  # type: ignore[arg-type]
