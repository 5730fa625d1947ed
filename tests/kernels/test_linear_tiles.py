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
        (64, 24576, 64), (64, 28672, 32),  # 384 fill three places each; 448 would not
        (64, 12288, 64),  # at most two each, with a stage more
        (64, 151936, 128), (64, 75968, 128), (32, 24576, 64), (8, 12288, 64),
    ],
)  # fmt: skip
def test_programs_are_as_wide_as_processors_stay_evenly_busy(num_rows: int, out_features: int, features: int) -> None:
    from worker.kernels.triton.linear import tile_of
    from worker.kernels.triton.machine import Machine

    h200 = Machine(num_sms=132, shared_memory=227 * 1024, can_overlap=True)
    assert tile_of(num_rows, out_features, 4096, h200, 2).features == features


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("num_rows", "in_features", "is_held"), [(3, 96, True), (16, 96, True), (24, 96, False), (64, 4112, False)]
)
def test_a_part_of_a_sum_is_sent_as_it_is_computed(
    rig: Rig, num_rows: int, in_features: int, is_held: bool, size: int
) -> None:
    """To all ranks, the rows that there are and no more, where each row's next message is expected; once received, it
    is added up like one that the norm sends."""
    from worker.kernels.triton.sum_norm import sum_and_norm
    from worker.parallel.symmetric import Inboxes

    rank, width, num_words = 1, 70, 40
    linear = rig.choose(LINEAR, LinearSpec(in_features, width))
    assert (linear.held_tile(num_rows) is not None) == is_held  # type: ignore[attr-defined]
    empty = torch.full((64, 2, size, num_words), -1, dtype=torch.int32, device=rig.device)
    all_inboxes = [empty.clone() for _ in range(size)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in all_inboxes], device=rig.device)
    turns = torch.arange(64, dtype=torch.int32, device=rig.device) % 2
    inboxes = Inboxes(addresses, turns.clone(), num_words, rank, all_inboxes[rank])
    x, weight, bias = rig.noise(num_rows, in_features), rig.noise(width, in_features, seed=1), rig.noise(width, seed=2)
    part = linear.sent(x, linear.pack(Dense(weight, bias)), inboxes)
    assert part is not None

    row, turn, words = torch.arange(num_rows, device=rig.device), turns[:num_rows].long(), width // 2
    messages = all_inboxes[rank][row, turn, rank, :words]
    product = messages.view(rig.dtype)
    rig.assert_close(product, exact_product(x, weight, bias, is_gated=False))
    expected = empty.clone()
    expected[row, turn, rank, :words] = messages
    for other, inbox in enumerate(all_inboxes):
        assert torch.equal(inbox, expected), other

    for other in range(size):
        all_inboxes[rank][row, turn, other, :words] = messages
    residual, norm_weight = rig.noise(num_rows, width, seed=3), rig.noise(width, seed=4)
    total = residual.double() + size * product.double()
    exact = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight.double()
    rig.assert_close(sum_and_norm(part, residual, norm_weight, 1e-6, inboxes, overlaps=False, num_warps=1), exact)
    assert torch.equal(all_inboxes[rank], empty), "what was received has left no trace"
    others = [inbox for other, inbox in enumerate(all_inboxes) if other != rank]
    assert all(torch.equal(inbox, expected) for inbox in others), "it was sent again"
    assert inboxes.turns[:num_rows].tolist() == (1 - turn).tolist()


def test_what_is_not_sent_as_it_is_computed(rig: Rig) -> None:
    """One row, more rows than the inboxes have, rows that are longer than a message."""
    from worker.parallel.symmetric import Inboxes

    inboxes = Inboxes.of(torch.empty(0), [0, 0], 0)
    for num_rows, width in ((1, 32), (65, 32), (2, 16384), (2, 33)):
        linear = rig.choose(LINEAR, LinearSpec(32, width))
        packed = linear.pack(Dense(rig.noise(width, 32), None))
        assert linear.sent(rig.noise(num_rows, 32), packed, inboxes) is None


@pytest.mark.parametrize(("num_rows", "in_features"), [(1, 96), (3, 96), (24, 4112), (70, 96)])
def test_a_product_is_written_beside_others(rig: Rig, num_rows: int, in_features: int) -> None:
    linear = rig.choose(LINEAR, LinearSpec(in_features, 70))
    x, weight = rig.noise(num_rows, in_features), rig.noise(70, in_features, seed=1)
    rows = torch.full((num_rows, 210), torch.nan, dtype=rig.dtype, device=rig.device)
    place = rows[:, 70:140]
    assert linear(x, linear.pack(Dense(weight, None)), place) is place
    rig.assert_close(place.contiguous(), exact_product(x, weight, None, is_gated=False))
    assert rows[:, :70].isnan().all() and rows[:, 140:].isnan().all()
