"""Weights of a byte or half of one: products against float64 of what the numbers mean."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.experts_rig import SPEC, Experts
from tests.kernels.rig import BACKENDS, IS_INTERPRETED, TOLERANCE, Rig
from tests.runner.conftest import make_driver, random_prompt
from tests.runner.logits import capture_logits
from tests.runner.quantized import FORMATS, make
from worker.kernels.experts import EXPERTS, ExpertWeights
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.select import Kernels
from worker.kernels.weights import Blocks, Dense, Form, Grouped
from worker.layers.linear import LinearBase

DEVICES = [torch.device(device) for name, device in BACKENDS if name == "triton"]
pytestmark = pytest.mark.skipif(not DEVICES, reason="needs an NVIDIA GPU, or Triton's interpreter: make kernels")

ALL = 0
FORMS: list[tuple[Form, int]] = [
    ("e4m3", ALL), ("e4m3", 128), ("e4m3", 16), ("int8", ALL), ("uint8", 16), ("uint4", 32), ("uint4", 128),
    ("e2m1", 32),
]  # fmt: skip
SIZES = {16: 96, 32: 160, 128: 384, ALL: 224}
"""Inputs that groups of so many fill, and most pieces do not."""
IN_NO_GROUPS = ("fp8-blocks", "w4a16-order", "gptq-order", "gptq-8-bits")
"""Checkpoints whose numbers are put together when they are read."""


@pytest.fixture
def rig() -> Rig:
    return Rig(Kernels(DEVICES[0], "triton"), torch.float16 if IS_INTERPRETED else torch.bfloat16)


def random_weight(form: Form, group: int, *shape: int, device: torch.device) -> Grouped:
    """Any bits, but NaN; scales of a usual size."""
    generator = torch.Generator().manual_seed(1)
    *outputs, inputs = shape
    width = inputs // 2 if form in ("uint4", "e2m1") else inputs
    numbers = torch.randint(0, 256, (*outputs, width), dtype=torch.uint8, generator=generator)
    num_groups = inputs // (group or inputs)
    scales, minima = torch.rand(2, *outputs, num_groups, generator=generator) * 0.02
    if form == "e4m3":
        numbers = torch.where((numbers & 127) == 127, 0, numbers).view(torch.float8_e4m3fn)
    if form == "int8":
        numbers = numbers.view(torch.int8)
    if form == "e2m1":
        exponents = torch.randint(115, 125, (*outputs, num_groups), dtype=torch.uint8, generator=generator)
        return Grouped(form, numbers.to(device), exponents.to(device))
    if form in ("uint4", "uint8"):
        return Grouped(form, numbers.to(device), scales.half().to(device), -minima.half().to(device))
    return Grouped(form, numbers.to(device), scales.to(device))


def close(rig: Rig, got: Tensor, x: Tensor, weight: Grouped) -> None:
    """Within what rounding a weight to the type of activations, and the result, can do: their sum's parts add up."""
    exact = x.double() @ weight.floats().double().T
    if weight.bias is not None:
        exact += weight.bias.double()
    assert got.dtype == rig.dtype and got.shape == exact.shape
    of_parts = x.double().abs() @ weight.floats().double().abs().T
    bound = TOLERANCE[rig.dtype] / 8 * of_parts + TOLERANCE[rig.dtype] * exact.abs()
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("form", "group"), FORMS)
def test_products(rig: Rig, form: Form, group: int) -> None:
    """Of outputs that fill no tile, with a bias."""
    inputs = SIZES[group]
    weight = random_weight(form, group, 37, inputs, device=rig.device).with_bias(rig.noise(37, seed=2))
    linear = rig.choose(LINEAR, LinearSpec(inputs, 37, Grouped))
    x, packed = rig.noise(5, inputs), linear.pack(weight)
    close(rig, linear(x, packed), x, weight)


@pytest.mark.parametrize("rows", [2, 40, 9])
def test_groups_around_whole_zero_points(rig: Rig, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """As AWQ, GPTQ and compressed-tensors have them: sums are scaled, and not each number. A group may be nothing."""
    from worker.kernels.triton import linear_grouped
    from worker.kernels.triton.weight_tile import CENTRED

    monkeypatch.setattr(linear_grouped, "has_many_programs", lambda *_: True)
    linear_grouped.tile_of.cache_clear()
    if rows == 9:
        monkeypatch.setattr(linear_grouped, "MAX_ROWS", 8)
    weight = random_weight("uint4", 128, 37, 384, device=rig.device)
    zeros = torch.randint(0, 16, weight.scales.shape, generator=torch.Generator().manual_seed(3)).to(rig.device)
    weight.scales[5, 1] = 0
    weight = replace(weight, minima=(weight.scales.float() * -zeros).half())
    linear = rig.choose(LINEAR, LinearSpec(384, 37, Grouped))
    x, packed = rig.noise(rows, 384), linear.pack(weight)
    assert packed.form == CENTRED.value
    close(rig, linear(x, packed), x, weight)
    linear_grouped.tile_of.cache_clear()


@pytest.mark.parametrize("rows", [1, 40])
def test_products_of_more_rows_have_larger_tiles(rig: Rig, rows: int) -> None:
    """Into a place that is given."""
    weight = random_weight("uint4", 32, 37, 96, device=rig.device)
    linear = rig.choose(LINEAR, LinearSpec(96, 37, Grouped))
    x, out = rig.noise(rows, 96), torch.empty(rows, 37, dtype=rig.dtype, device=rig.device)
    assert linear(x, linear.pack(weight), out).data_ptr() == out.data_ptr()
    close(rig, out, x, weight)


@pytest.mark.parametrize(("form", "group"), FORMS)
def test_products_of_many_rows_are_of_the_whole_weight(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, form: Form, group: int
) -> None:
    """Put together first, rounded once."""
    from worker.kernels.triton import linear_grouped

    inputs = SIZES[group]
    linear = rig.choose(LINEAR, LinearSpec(inputs, 19, Grouped))
    monkeypatch.setattr(linear_grouped, "MAX_ROWS", 8)
    weight = random_weight(form, group, 19, inputs, device=rig.device).with_bias(rig.noise(19, seed=2))
    packed = linear.pack(weight)
    assert torch.equal(linear.weight(packed, rig.dtype), weight.floats().to(rig.dtype))
    if form != "e4m3" or group == ALL:
        x = rig.noise(9, inputs)
        close(rig, linear(x, packed, torch.empty(9, 19, dtype=rig.dtype, device=rig.device)), x, weight)
        assert linear.gated(x, packed) is None


@pytest.mark.parametrize(("form", "group"), [("e4m3", ALL), ("uint4", 32)])
@pytest.mark.parametrize("rows", [1, 40])
def test_gated_products(rig: Rig, form: Form, group: int, rows: int) -> None:
    inputs = SIZES[group]
    weight = random_weight(form, group, 70, inputs, device=rig.device)
    bias, x = rig.noise(70, seed=2), rig.noise(rows, inputs) * 0.2
    linear = rig.choose(LINEAR, LinearSpec(inputs, 70, Grouped))
    gate, up = (x.double() @ weight.floats().double().T + bias.double()).chunk(2, -1)
    rig.assert_close(linear.gated(x, linear.pack(weight.with_bias(bias))), torch.nn.functional.silu(gate) * up)


def test_a_device_without_float8_has_its_numbers_put_together_from_bits(rig: Rig) -> None:
    """To the bit, all 254 of them."""
    from worker.kernels.triton.linear_grouped import TritonGroupedLinear
    from worker.kernels.triton.machine import machine_of

    machine = replace(machine_of(rig.device), has_float8=False)
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = torch.where((numbers & 127) == 127, 0, numbers).view(torch.float8_e4m3fn)[None].to(rig.device)
    weight = Grouped("e4m3", numbers, torch.ones(1, 2, device=rig.device))
    linear = TritonGroupedLinear(LinearSpec(256, 1, Grouped), machine)
    assert torch.equal(linear.weight(linear.pack(weight), rig.dtype), weight.floats().to(rig.dtype))


def test_shapes_that_no_group_fills_stay_plain(rig: Rig) -> None:
    assert rig.kernels.find(LINEAR, LinearSpec(40, 8, Grouped), rig.dtype) is None
    assert rig.kernels.find(LINEAR, LinearSpec(64, 8, Grouped), torch.float32) is None


@pytest.mark.parametrize(
    ("form", "group", "num_tokens"), [("e4m3", 32, 2), ("uint4", 32, 2), ("e2m1", 32, 40), ("uint4", 128, 9)]
)
def test_experts(rig: Rig, form: Form, group: int, num_tokens: int) -> None:
    """With biases; of other ranks, too. Groups of 128: around zero points."""
    hidden, inner = (128, 128) if group == 128 else (64, 96)
    spec = replace(SPEC, hidden_size=hidden, intermediate_size=inner, has_bias=True, first_expert=2, kind=Grouped)
    plain = Experts(rig, replace(spec, kind=Dense), num_tokens)
    device = rig.device
    gate_up = random_weight(form, group, 6, 2 * inner, hidden, device=device).with_bias(plain.gate_up_bias)
    down = random_weight(form, group, 6, hidden, inner, device=device).with_bias(plain.down_bias)
    if group == 128:
        gate_up, down = (replace(weight, minima=weight.scales * -8) for weight in (gate_up, down))
    plain.gate_up, plain.down = gate_up.floats(), down.floats()
    plain.x *= 0.1
    kernel = rig.choose(EXPERTS, spec)
    ids = plain.ids - 1  # the first one is nobody's here
    got = kernel(plain.x.clone(), plain.weights, ids, kernel.pack(ExpertWeights(gate_up, down)))
    rig.assert_close(got, plain.exact(ids))


# --- the weights themselves


def test_blocks_become_groups_of_the_same_numbers() -> None:
    for bits in (4, 8):
        blocks = Blocks.of(torch.randn(6, 96, generator=torch.Generator().manual_seed(0)), bits)
        grouped = Grouped.of_blocks(blocks)
        assert torch.equal(grouped.floats(), blocks.floats())
        assert grouped.num_bytes == blocks.num_bytes and grouped.group == 32


def test_parts_in_other_groups_are_joined_in_the_smaller_ones() -> None:
    device = torch.device("cpu")
    parts = [random_weight("e4m3", group, rows, 256, device=device) for group, rows in ((ALL, 3), (128, 5), (32, 2))]
    joined = Grouped.joined(parts)
    assert joined is not None and joined.group == 32
    assert torch.equal(joined.floats(), torch.cat([part.floats() for part in parts]))
    assert Grouped.joined([parts[0], random_weight("int8", ALL, 3, 256, device=device)]) is None


# --- a whole model


@pytest.mark.parametrize("name", ["w4a16-zeros"] if IS_INTERPRETED else sorted(FORMATS))
def test_a_stored_models_logits_are_those_of_its_numbers(tmp_path: Path, name: str) -> None:
    """Within the rounding of half precision."""
    from worker.kernels.triton.weight_tile import PackedGrouped

    model, prompt = make(tmp_path, name), random_prompt(5, 0)
    dtype = "float16" if IS_INTERPRETED else "bfloat16"
    driver = make_driver(
        tmp_path, device=DEVICES[0].type, kernel_backend="triton", dtype=dtype, quantization="auto", enforce_eager=True
    )
    layers = [module.packed for module in driver.runner._model.modules() if isinstance(module, LinearBase)]
    assert {isinstance(packed, PackedGrouped) for packed in layers} == {name not in IN_NO_GROUPS}
    seen = capture_logits(driver)
    driver.prefill(driver.add(prompt))
    with torch.inference_mode():
        exact = model(torch.tensor([prompt])).logits[0, -1]
    assert (seen[0][0].cpu().float() - exact).abs().max() < (0.01 if IS_INTERPRETED else 0.05) * exact.abs().max()
