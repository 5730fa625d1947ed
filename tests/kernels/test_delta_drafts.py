"""Gated DeltaNet where the last tokens of a row may turn out never to have been: what the others find is what a float64
recurrence over them alone finds."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.fakes.graphs import RecordedGraphs
from tests.kernels.delta_rig import SPECS, exact_rule
from tests.kernels.rig import Rig
from worker.attention.delta import DeltaBuilder
from worker.core.cache.pools import PoolKind, PoolPlan, bytes_of
from worker.kernels.delta import DeltaParameters, DeltaSpec, DeltaState
from worker.kernels.step import Chunk, Step, StepBuffers

NUM_DRAFTS = 3
NUM_GROUPS = 6
WRONG = 40.0
"""Times what a token usually is: what it leaves anywhere cannot go unnoticed."""


@dataclass
class Request:
    group: int
    x: Tensor
    """[T, C + 2 × H]: of the tokens that there will be."""
    num_known: int = 0
    outputs: list[Tensor] = field(default_factory=list)


class Layer:
    """Where the builder's only state goes."""

    state: DeltaState

    def bind(self, number: int, state: DeltaState) -> None:
        self.state = state


class Requests:
    """What a model with one layer does for them."""

    def __init__(self, rig: Rig, sizes: tuple[int, int, int, int, int], num: int) -> None:
        self.rig, self.spec = rig, DeltaSpec(*sizes, dtype=rig.dtype, num_drafts=NUM_DRAFTS)
        spec, heads = self.spec, self.spec.num_value_heads
        self.layer = Layer()
        self.builder = DeltaBuilder(spec, [self.layer], 0, rig.kernels)
        self.builder.allocate(PoolPlan(0, NUM_GROUPS, 0, 0))
        self.rule = DeltaParameters(
            rig.noise(heads, seed=3).float() * 0.5, rig.noise(heads, seed=4).float(),
            rig.noise(spec.num_channels, spec.width, seed=5).float(),
        )  # fmt: skip
        self.all = [
            Request(NUM_GROUPS - 1 - i, rig.noise(99, spec.num_channels + 2 * heads, seed=i)) for i in range(num)
        ]

    def step(self, single: list[int], *chunks: tuple[int, int, int]) -> None:
        """A token of each of `single`; a row of padding; and of (request, tokens, how many are right)."""
        rows = [(number, 1, 1) for number in single] + list(chunks)
        lens = [num for _, num, _ in rows]
        lens.insert(len(single), 1)
        groups = [self.all[number].group for number, *_ in rows]
        groups.insert(len(single), NUM_GROUPS)
        firsts = [self.all[number].num_known for number, *_ in rows]
        firsts.insert(len(single), 0)
        buffers = StepBuffers.allocate(sum(lens), len(lens), 2, 9, self.rig.device)
        buffers.groups.copy_(torch.tensor(groups))
        buffers.query_starts[1:] = torch.tensor(lens).cumsum(0)
        places = [torch.arange(first, first + num) for first, num in zip(firsts, lens, strict=True)]
        buffers.positions.copy_(torch.cat(places))
        step = Step(
            num_uniform_rows=len(single) + 1, num_padding_rows=1, max_context_len=99,
            chunks=tuple(Chunk(num, num) for _, num, _ in chunks),
        )  # fmt: skip
        parts = [self.tokens(*row) for row in rows]
        parts.insert(len(single), torch.zeros_like(parts[0][:1]))
        found = list(self.run(step, buffers, torch.cat(parts)).split(lens))
        del found[len(single)]
        for (number, _, right), out in zip(rows, found, strict=True):
            self.all[number].outputs.append(out[:right])
            self.all[number].num_known += right

    def tokens(self, number: int, num: int, right: int) -> Tensor:
        request = self.all[number]
        x = request.x[request.num_known : request.num_known + num].clone()
        x[right:] = WRONG * self.rig.noise(num - right, x.shape[1], seed=number)
        return x

    def run(self, step: Step, buffers: StepBuffers, x: Tensor) -> Tensor:
        kernel, spec, heads = self.builder._kernel, self.spec, self.spec.num_value_heads
        metadata = self.builder.prepare(step, buffers)
        qkv, a, b = x.split((spec.num_channels, heads, heads), -1)
        mixed = kernel.convolve(qkv, self.rule, self.layer.state, metadata)
        return kernel.update(mixed, a, b, self.rule, self.layer.state, metadata)

    def fork(self, number: int, group: int) -> None:
        """A new request that begins as this one and goes on in another way, from a copy of its group."""
        parent = self.all[number]
        x = self.rig.noise(*parent.x.shape, seed=77)
        x[: parent.num_known] = parent.x[: parent.num_known]
        for entry in self.builder.entry_tensors():
            assert entry.kind is PoolKind.STATE and entry.entries_per_request == 1
            entry.tensor[group] = entry.tensor[parent.group]
        self.all.append(Request(group, x, parent.num_known, list(parent.outputs)))

    def check(self) -> None:
        spec = self.spec
        for request in self.all:
            x = request.x[: request.num_known]
            inputs = torch.cat((torch.zeros_like(x[: spec.width - 1]), x))[:, : spec.num_channels]
            nothing = torch.zeros_like(self.layer.state.recurrent[0])
            exact, _ = exact_rule(spec, self.rule, inputs, x, nothing, self.rig.dtype)
            self.rig.assert_close(torch.cat(request.outputs), exact)


@pytest.mark.parametrize("sizes", SPECS, ids=str)
def test_rows_go_on_from_the_last_token_that_was_right(rig: Rig, sizes: tuple[int, int, int, int, int]) -> None:
    requests = Requests(rig, sizes, 3)
    requests.step([], (0, 20, 20), (1, 3, 3), (2, 1, 1))
    requests.step([2], (0, 4, 1), (1, 2, 2))
    requests.step([0], (1, 9, 9), (2, 4, 4))
    requests.step([1], (0, 4, 2), (2, 4, 1))
    requests.fork(0, 0)
    requests.step([2], (0, 4, 4), (1, 4, 3), (3, 70, 70))
    requests.step([3, 0, 1, 2])
    requests.step([1, 0], (2, 2, 1), (3, 4, 3))
    requests.step([3], (2, 1, 1), (0, 5, 5))
    requests.check()


def test_any_rows_in_any_order(rig: Rig) -> None:
    requests, random = Requests(rig, SPECS[1], 4), torch.Generator().manual_seed(8)
    for _ in range(8):
        single, chunks = [], []
        for number in torch.randperm(4, generator=random).tolist():
            kind, draw = (int(torch.randint(n, (), generator=random)) for n in (4, NUM_DRAFTS))
            if kind == 0:
                single.append(number)
            elif kind == 1:
                chunks.append((number, 2 + draw, 2 + draw))
            elif kind == 2:
                chunks.append((number, 1 + NUM_DRAFTS, 1 + draw))
        requests.step(single, *chunks or [(0, 6, 6)])
    requests.check()


def test_how_far_rows_are_behind_is_worked_out_on_the_device(rig: Rig) -> None:
    """A graph finds it anew each time: rows of one token after ones of as many as there can be drafts and one."""
    builder = DeltaBuilder(DeltaSpec(*SPECS[1], rig.dtype, NUM_DRAFTS), [Layer()], 0, rig.kernels)
    builder.allocate(PoolPlan(0, NUM_GROUPS, 0, 0))
    buffers = StepBuffers.allocate(9, 2, 2, 9, rig.device)
    buffers.groups.copy_(torch.tensor([4, 1]))

    def fill(*rows: tuple[int, int]) -> None:
        """(position, tokens) of each."""
        buffers.query_starts[1:] = torch.tensor([num for _, num in rows]).cumsum(0)
        places = torch.cat([torch.arange(first, first + num) for first, num in rows])
        buffers.positions[: len(places)] = places

    tentative = Step(num_uniform_rows=0, chunks=(Chunk(4, 4), Chunk(4, 4)), max_context_len=9)
    single = Step(num_uniform_rows=2, max_context_len=9)
    graphs = RecordedGraphs()
    fill((0, 4), (0, 4))
    assert builder._catch_up(tentative, buffers).tolist() == [0, 0]
    fill((3, 1), (1, 1))
    with graphs.recording():
        graph = graphs.begin()
        lag = builder._catch_up(single, buffers)
        graph.capture_end()
    assert lag.tolist() == [3, 1]
    fill((4, 4), (2, 4))
    assert builder._catch_up(tentative, buffers).tolist() == [0, 0]
    fill((6, 1), (6, 1))
    graph.replay()
    assert lag.tolist() == [2, 4]


def test_what_is_declared_is_what_is_allocated(rig: Rig) -> None:
    """A request's group: its share of every tensor that is moved with it."""
    for num_drafts in (0, NUM_DRAFTS):
        builder = DeltaBuilder(DeltaSpec(*SPECS[1], rig.dtype, num_drafts), [Layer(), Layer()], 0, rig.kernels)
        builder.allocate(PoolPlan(0, NUM_GROUPS, 0, 0))
        moved = sum(entry.tensor.nbytes for entry in builder.entry_tensors())
        assert bytes_of(builder.pool_specs(), PoolKind.STATE) * (NUM_GROUPS + 1) == moved
