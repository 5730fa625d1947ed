"""Greedy tokens that a product finds without logits are those that are chosen from logits."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.levels import at_level
from tests.kernels.rig import CPU, HAS_NATIVE, Rig
from tests.kernels.sampling_rig import GREEDY, draws_of
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.native import library
from worker.kernels.native.build import LEVELS, Level, this_cpu
from worker.kernels.native.linear import NativeLinear
from worker.kernels.sampling import CHOOSE, FAILED
from worker.kernels.select import Kernels
from worker.kernels.weights import Blocks, Dense, Weight

pytestmark = pytest.mark.skipif(not HAS_NATIVE, reason="needs AVX2 and a C++ compiler")
IN = 96
INF, NAN = math.inf, math.nan


@pytest.fixture
def rig() -> Rig:
    return Rig(Kernels(CPU, "native"), torch.float32)


@pytest.fixture(params=[level for level in LEVELS if level.cpu_flags <= this_cpu()], ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Iterator[Level]:
    """Of the kernels that the test makes. Compiled once, in some seconds."""
    with at_level(request.param):
        yield request.param


def in_form(weight: Tensor, form: str, bias: Tensor | None) -> Weight:
    if form == "floats":
        return Dense(weight, bias)
    bits, block = {"8 bits": (8, 32), "small blocks": (8, 16), "centred": (8, 32), "4 bits": (4, 32)}[form]
    blocks = replace(Blocks.of(weight, bits).in_form(bits, block), bias=bias)
    return replace(blocks, minima=blocks.scales * -128) if form == "centred" else blocks


def both(rig: Rig, weight: Weight, x: Tensor, num_threads: int = 1) -> tuple[list[int], list[int]]:
    """Tokens found, and tokens chosen from logits."""
    linear = rig.choose(LINEAR, LinearSpec(x.shape[1], rows_of(weight), type(weight)))
    assert isinstance(linear, NativeLinear)
    linear._engine = library.Engine(library._functions(), num_threads)
    packed = linear.pack(weight)
    logits = linear(x, packed)
    draws = draws_of([GREEDY] * len(x), [0] * len(x), logits.shape[1], CPU)
    return linear.finder(packed)(x).tolist(), rig.choose(CHOOSE, None)(logits, None, draws).tolist()


def rows_of(weight: Weight) -> int:
    return len(weight.weight if isinstance(weight, Dense) else weight.scales)


@pytest.mark.parametrize("form", ["floats", "8 bits", "small blocks", "centred", "4 bits"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_number_of_rows(level: Level, rig: Rig, form: str, has_bias: bool) -> None:
    """A last panel that is not full, and some threads."""
    out = 1059
    weight = in_form(rig.noise(out, IN, seed=1), form, rig.noise(out, seed=2) if has_bias else None)
    x = rig.noise(40, IN)
    for num_rows in range(1, 41):
        found, chosen = both(rig, weight, x[:num_rows], 1 + num_rows % 3)
        assert found == chosen
    assert len(set(found)) > 20


def test_more_rows_than_go_over_panels_together(rig: Rig) -> None:
    found, chosen = both(rig, Dense(rig.noise(300, 32, seed=1)), rig.noise(1300, 32), 2)
    assert found == chosen


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_of_equal_outputs_the_first(level: Level, rig: Rig, num_threads: int) -> None:
    """In one vector, in neighbours, and far apart, whichever thread sees them first."""
    out, x = 40_000, rig.noise(6, 32)
    for places in ([5, 6], [3, 19], [100, 37_000], [39_999, 20_000, 8191, 8192]):
        weight = rig.noise(out, 32, seed=1) / 100
        weight[places] = x.sum(0)
        some = x[(x @ x.sum(0)) > 1]
        found, chosen = both(rig, Dense(weight), some, num_threads)
        assert found == chosen == [min(places)] * len(some)
    found, chosen = both(rig, Dense(torch.zeros(out, 32)), x, num_threads)
    assert found == chosen == [0] * 6


def test_outputs_below_zero_are_above_what_fills_a_panel(level: Level, rig: Rig) -> None:
    weight, bias = torch.zeros(37, 32), torch.full((37,), -3.0)
    bias[36] = -2
    found, chosen = both(rig, Dense(weight, bias), rig.noise(3, 32))
    assert found == chosen == [36] * 3


@pytest.mark.parametrize("form", ["floats", "8 bits"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_fails_alone(level: Level, rig: Rig, form: str, value: float) -> None:
    weight, x = in_form(rig.noise(300, IN, seed=1), form, None), rig.noise(14, IN)
    x[5, 7] = value
    found, chosen = both(rig, weight, x)
    assert found == chosen
    assert [row for row, token in enumerate(found) if token == FAILED] == [5]


@pytest.mark.parametrize(
    ("values", "expected"),
    [({70: NAN}, FAILED), ({0: NAN, 1: INF}, FAILED), ({69: INF}, FAILED), ({3: -INF, 69: 50.0}, 69)],
)
def test_an_output_that_is_not_finite(level: Level, rig: Rig, values: dict[int, float], expected: int) -> None:
    bias = torch.zeros(71)
    for token, value in values.items():
        bias[token] = value
    found, chosen = both(rig, Dense(rig.noise(71, 32, seed=1) / 100, bias), rig.noise(3, 32))
    assert found == chosen == [expected] * 3


def test_a_row_whose_outputs_are_all_minus_infinity(level: Level, rig: Rig) -> None:
    found, chosen = both(rig, Dense(torch.zeros(71, 32), torch.full((71,), -INF)), rig.noise(3, 32))
    assert found == chosen == [FAILED] * 3
