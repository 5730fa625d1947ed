"""Gated DeltaNet against a float64 recurrence, token by token. States of groups that are not in the step are NaN."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.delta_rig import SPECS, exact_rule
from tests.kernels.rig import Rig
from worker.kernels.delta import DELTA, GATED_NORM, DeltaParameters, DeltaSpec, DeltaState, GatedNormSpec
from worker.kernels.step import Chunk, Step, StepBuffers


@dataclass
class DeltaRows:
    """Rows of one token each, of which the last `num_padding` are padding, then chunks; with states of earlier ones."""

    rig: Rig
    spec: DeltaSpec
    num_single: int
    chunks: list[int]
    num_padding: int = 0

    def __post_init__(self) -> None:
        rig, spec = self.rig, self.spec
        self.num_tokens = self.num_single + sum(self.chunks)
        num_rows = self.num_single + len(self.chunks)
        num_groups = num_rows + 3
        self.groups = torch.randperm(num_groups, generator=torch.Generator().manual_seed(1))[:num_rows]
        self.groups[self.num_single - self.num_padding : self.num_single] = num_groups
        heads, seed = spec.num_value_heads, 2
        self.x = rig.noise(self.num_tokens, spec.num_channels + 2 * heads, seed=seed)
        """Wider than the channels, as a projection with more beside them is."""
        self.parameters = DeltaParameters(
            rig.noise(heads, seed=3).float() * 0.5, rig.noise(heads, seed=4).float(),
            rig.noise(spec.num_channels, spec.width, seed=5).float(),
        )  # fmt: skip
        self.before = DeltaState.zeros(spec, num_groups + 1, rig.device)
        self.before.inputs.copy_(rig.noise(*self.before.inputs.shape, seed=6))
        self.before.recurrent.copy_(rig.noise(*self.before.recurrent.shape, seed=7).float() * 0.3)
        self.is_idle = torch.ones(num_groups + 1, dtype=torch.bool)
        self.is_idle[self.groups] = False
        for tensor in self.before.tensors:
            tensor[self.is_idle] = torch.nan
        self.state = DeltaState(self.before.inputs.clone(), self.before.recurrent.clone(), self.before.log.clone())
        self.starts = [9 + 5 * row for row in range(num_rows)]
        """Positions of the rows' first tokens."""

    def run(self) -> Tensor:
        """[T, H, V] of all tokens."""
        buffers = StepBuffers.allocate(self.num_tokens, len(self.groups), 2, 9, self.rig.device)
        buffers.groups.copy_(self.groups)
        lens = [1] * self.num_single + self.chunks
        buffers.query_starts[1:] = torch.tensor(lens).cumsum(0)
        places = [torch.arange(start, start + num) for start, num in zip(self.starts, lens, strict=True)]
        buffers.positions.copy_(torch.cat(places))
        step = Step(
            num_uniform_rows=self.num_single,
            chunks=tuple(Chunk(n, n + 5) for n in self.chunks),
            max_context_len=99,
            num_padding_rows=self.num_padding,
        )
        kernel = self.rig.choose(DELTA, self.spec)
        metadata = kernel.prepare(step, buffers, None)
        channels, heads = self.spec.num_channels, self.spec.num_value_heads
        qkv, a, b = self.x.split((channels, heads, heads), -1)
        mixed = kernel.convolve(qkv, self.parameters, self.state, metadata)
        return kernel.update(mixed, a, b, self.parameters, self.state, metadata)

    def real(self) -> list[tuple[int, int, int, int]]:
        """(group, position of the first token, first token, end) of each row but padding."""
        rows, at = [], 0
        for row, length in enumerate([1] * self.num_single + self.chunks):
            if self.groups[row] < len(self.before.inputs) - 1:
                rows.append((int(self.groups[row]), self.starts[row], at, at + length))
            at += length
        return rows

    def exact(self, group: int, position: int, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs, last inputs, last state) of a row, in float64."""
        places = self.places(position)
        inputs = torch.cat((self.before.inputs[group][places], self.x[start:end, : self.spec.num_channels]))
        outputs, state = exact_rule(
            self.spec, self.parameters, inputs, self.x[start:end], self.before.recurrent[group], self.rig.dtype
        )
        return outputs, inputs[end - start :], state

    def places(self, position: int) -> list[int]:
        """Of the inputs right before a position, the oldest first."""
        num = self.spec.width - 1
        return [(position - num + i) % num for i in range(num)]


def check(rows: DeltaRows) -> None:
    got = rows.run()
    for group, position, start, end in rows.real():
        outputs, inputs, state = rows.exact(group, position, start, end)
        rows.rig.assert_close(got[start:end], outputs)
        assert torch.equal(rows.state.inputs[group][rows.places(position + end - start)], inputs)
        rows.rig.assert_close(rows.state.recurrent[group].to(rows.rig.dtype), state)
    idle = rows.is_idle.clone()
    idle[-1] = False  # the spare group
    for before, after in zip(rows.before.tensors, rows.state.tensors, strict=True):
        torch.testing.assert_close(after[idle], before[idle], rtol=0, atol=0, equal_nan=True)


def spec_of(rig: Rig, sizes: tuple[int, int, int, int, int]) -> DeltaSpec:
    return DeltaSpec(*sizes, dtype=rig.dtype)


@pytest.mark.parametrize("sizes", SPECS, ids=str)
def test_rows_of_one_token(rig: Rig, sizes: tuple[int, int, int, int, int]) -> None:
    check(DeltaRows(rig, spec_of(rig, sizes), 4, []))


def test_padding_touches_the_spare_group_alone(rig: Rig) -> None:
    check(DeltaRows(rig, spec_of(rig, SPECS[1]), 5, [], num_padding=3))


@pytest.mark.parametrize("chunks", [[1], [70], [2, 64, 1, 130]], ids=str)
def test_chunks_go_on_from_their_state(rig: Rig, chunks: list[int]) -> None:
    check(DeltaRows(rig, spec_of(rig, SPECS[1]), 0, chunks))


@pytest.mark.parametrize("sizes", SPECS, ids=str)
def test_rows_and_chunks_in_one_step(rig: Rig, sizes: tuple[int, int, int, int, int]) -> None:
    check(DeltaRows(rig, spec_of(rig, sizes), 3, [5, 33], num_padding=1))


def test_equal_keys_do_not_blow_up(rig: Rig) -> None:
    """A prompt that says one thing over and over: the system of a chunk is then as bad as it can be."""
    rows = DeltaRows(rig, spec_of(rig, SPECS[1]), 0, [64])
    rows.x[:] = rows.x[:1]
    rows.parameters.log_decay.fill_(-20)
    check(rows)


def test_fast_decays_keep_their_precision(rig: Rig) -> None:
    """Their logarithms add up to thousands within a chunk; two of these sums differ by little."""
    rows = DeltaRows(rig, spec_of(rig, SPECS[1]), 0, [64])
    rows.parameters.log_decay.copy_(torch.tensor([16.0, 4.0, 1.0, 0.01]).log())
    rows.parameters.bias[0] = 8.0
    rows.x[60:, -8:-4] = -20.0  # of the last tokens, so slow that what they bring stays
    check(rows)


def test_gated_norm(rig: Rig) -> None:
    x, wide, weight = rig.noise(5, 3, 24, seed=1), rig.noise(5, 100, seed=2), 1 + 0.2 * rig.noise(24, seed=3)
    gate = wide[:, 7 : 7 + 72].unflatten(-1, (3, 24))
    got = rig.choose(GATED_NORM, GatedNormSpec(24))(x, gate, weight, 1e-6)
    y = x.double()
    exact = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double() * functional.silu(gate.double())
    rig.assert_close(got, exact.flatten(1))
