"""Triton's products of few rows: whole parts of a small weight, and tiles of all proportions."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.kernels.rig import BACKENDS, DTYPES, Rig
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.select import Kernels
from worker.kernels.weights import Dense

DEVICES = [torch.device(device) for name, device in BACKENDS if name == "triton"]
pytestmark = pytest.mark.skipif(not DEVICES, reason="needs an NVIDIA GPU, or Triton's interpreter: make kernels")


@pytest.fixture
def rig() -> Rig:
    """In two bytes: float32 is cuBLAS's."""
    return Rig(Kernels(DEVICES[0], "triton"), DTYPES[1])


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_gated: bool) -> Tensor:
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    gate, *up = product.chunk(1 + is_gated, -1)
    return silu(gate) * up[0] if is_gated else gate


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features", "is_held"),
    [(2, 102, 96, True), (16, 40, 1104, True), (9, 36, 3072, True), (16, 70, 4112, False), (17, 70, 96, False)],
)
def test_a_product_of_few_rows_holds_a_small_weight(
    rig: Rig, num_rows: int, out_features: int, in_features: int, is_held: bool, is_gated: bool
) -> None:
    """Outputs and inputs that fill no tile; more inputs than are taken at a time; more than a program holds."""
    linear = rig.choose(LINEAR, LinearSpec(in_features, out_features))
    assert (linear.held_tile(num_rows) is not None) == is_held  # type: ignore[attr-defined]
    x, weight = rig.noise(num_rows, in_features), rig.noise(out_features, in_features, seed=1)
    bias = rig.noise(out_features, seed=2)
    packed = linear.pack(Dense(weight, bias))
    found = linear.gated(x, packed) if is_gated else linear(x, packed)
    assert found is not None
    rig.assert_close(found, exact_product(x, weight, bias, is_gated=is_gated))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("num_rows", "features", "piece"), [(3, 64, 128), (20, 64, 64), (64, 128, 64), (64, 32, 128)])
def test_tiles_of_more_and_of_fewer_features_than_rows(
    rig: Rig, num_rows: int, features: int, piece: int, is_gated: bool
) -> None:
    from worker.kernels.triton.linear_rows import Tile

    linear = rig.choose(LINEAR, LinearSpec(336, 202))
    x, weight = rig.noise(num_rows, 336), rig.noise(202, 336, seed=1)
    exact = exact_product(x, weight, None, is_gated=is_gated)
    out = torch.full_like(exact, torch.nan, dtype=rig.dtype)
    tile = Tile(max(16, 1 << (num_rows - 1).bit_length()), features, piece, num_stages=3)
    linear.launch(x, linear.pack(Dense(weight)), out, tile, is_gated=is_gated)  # type: ignore[attr-defined]
    rig.assert_close(out, exact)


@pytest.mark.parametrize(
    ("num_rows", "out_features", "features"),
    [
        (64, 4096, 32), (64, 6144, 64),  # a program on each of the 132 processors, or less
        (64, 24576, 64), (64, 12288, 32), (64, 28672, 32),  # 384 fill three places each; 192 and 448 would not
        (64, 151936, 128), (64, 75968, 128), (32, 24576, 64), (8, 12288, 64),
    ],
)  # fmt: skip
def test_programs_are_as_wide_as_processors_stay_evenly_busy(num_rows: int, out_features: int, features: int) -> None:
    from worker.kernels.triton.linear import tile_of
    from worker.kernels.triton.machine import Machine

    h200 = Machine(num_sms=132, shared_memory=227 * 1024, can_overlap=True)
    assert tile_of(num_rows, out_features, 4096, h200, 2).features == features
