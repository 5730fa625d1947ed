"""Weights in blocks: what is read from GGUF files, what is made of other weights, and what it costs in quality."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.kernels.levels import has_whole_scales
from tests.runner.conftest import make_driver
from tests.runner.perplexity import prose_perplexity
from tests.runner.rounding import HALVES, Type, random_rows, rounded_rows, row_steps
from tests.runner.whole_scales import floats_as_kept, product_as_kept
from worker.kernels.linear import LINEAR, TABLE, LinearSpec
from worker.kernels.native.library import obstacle
from worker.kernels.native.linear import matrix_of
from worker.kernels.select import Kernels
from worker.kernels.weights import Blocks, Dense
from worker.layers.loaded import LoadedWeight
from worker.layers.setup import LayerSetup
from worker.loader.errors import ModelConfigError
from worker.loader.gguf.blocks import read_blocks
from worker.loader.gguf.checkpoint import GGUFLazyTensor
from worker.loader.gguf.file import GGUFTensor
from worker.parallel.group import ALONE, Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

pytestmark = pytest.mark.skipif(obstacle() is not None, reason="needs AVX2 and a C++ compiler")
FORMS = [(4, 32), (8, 32), (8, 16)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_a_files_blocks_are_read_as_they_are(kind: Type) -> None:
    """Those with scales in two parts up to the rounding of their product to half precision."""
    rows = random_rows(kind)
    blocks = read_blocks(rows, kind)
    assert blocks is not None
    exact = torch.from_numpy(dequantize(rows, kind))
    error = (blocks.floats() - exact).abs().max() / exact.abs().max()
    assert error < 2**-11 if kind.name.endswith(("K", "XS")) else error == 0
    assert blocks.is_exact == (error == 0)


def test_blocks_whose_least_is_too_large_for_half_precision_are_not_exact() -> None:
    rows = random_rows(Type.Q8_0)
    rows[0, :2] = np.array([600], np.float16).view(np.uint8)
    blocks = read_blocks(rows, Type.Q8_0)
    assert blocks is not None and not blocks.is_exact


@pytest.mark.parametrize("kinds", [(Type.Q4_1, Type.Q8_0), (Type.Q4_1, Type.Q4_K), (Type.Q6_K, Type.Q4_0)])
def test_numbers_of_a_file_are_the_same_whether_they_come_as_blocks_or_not(kinds: tuple[Type, Type]) -> None:
    """Two projections of one layer, side by side."""
    setup = LayerSetup(Kernels(torch.device("cpu"), "torch"), ALONE, torch.float32)
    weight = LoadedWeight(setup, 12, 768)
    for at, kind in zip((0, 6), kinds, strict=True):
        weight.load_rows(at, GGUFLazyTensor(GGUFTensor((6, 768), kind, random_rows(kind).data.cast("B")), None), 0, 6)
    dense = weight.take(None)
    assert isinstance(dense, Dense)
    assert torch.equal(
        dense.weight, torch.cat([torch.from_numpy(dequantize(random_rows(kind), kind)) for kind in kinds])
    )


def test_what_is_not_in_blocks_stays_as_it_is() -> None:
    assert read_blocks(np.zeros((2, 64), np.uint8), Type.F16) is None


def test_parts_of_different_formats_are_joined_in_one_that_holds_all() -> None:
    parts = [read_blocks(random_rows(kind), kind) for kind in (Type.Q4_1, Type.Q6_K, Type.Q8_0)]
    joined = Blocks.joined([part for part in parts if part is not None])
    assert (joined.bits, joined.block) == (8, 16)
    assert torch.equal(joined.floats(), torch.cat([part.floats() for part in parts if part is not None]))


@pytest.mark.parametrize(("bits", "error"), [(8, 0.004), (4, 0.06)])
def test_weights_are_rounded_to_the_nearest(bits: int, error: float) -> None:
    weight = noise(10, 96)
    weight[3, 32:64] = 0.25  # a block without a range
    blocks = Blocks.of(weight, bits)
    assert int(blocks.in_bytes().max()) == 2**bits - 1
    assert (blocks.floats() - weight).abs().max() < error * weight.abs().max()
    assert torch.equal(blocks.floats()[3, 32:64], weight[3, 32:64])


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_panels_have_the_numbers_of_the_file(kind: Type) -> None:
    """As they are stored, and expanded to floats; outputs that fill no panel. These scales differ as no file's do, so
    that not all stay what they are where they are whole numbers."""
    stored = read_blocks(random_rows(kind, 43), kind)
    assert stored is not None
    ids = torch.arange(43)
    for weight, floats in ((stored, floats_as_kept(stored)), (Dense(stored), stored.floats())):
        table = Kernels(torch.device("cpu")).choose(TABLE, LinearSpec(768, 43, type(weight)), torch.float32)
        assert torch.equal(table.rows(table.pack(weight), ids), floats)
        largest = (stored.minima.float() / 8 + stored.scales.float()).abs().maximum(stored.scales.float().abs()).amax(1)
        assert ((floats - stored.floats()).abs() <= 16 * 2**-15 * largest[:, None]).all()


def test_whole_scales_down_to_an_eighth_of_the_largest_are_exact() -> None:
    weight = Blocks.of(noise(70, 64), 4)
    weight.scales[:, 1] = weight.scales[:, 0] / 8
    weight.minima[:, 1] = weight.minima[:, 0] / 8
    table = Kernels(torch.device("cpu")).choose(TABLE, LinearSpec(64, 70, Blocks), torch.float32)
    assert torch.equal(table.rows(table.pack(weight), torch.arange(70)), weight.floats())


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 29])
def test_products_of_blocks(form: tuple[int, int], num_rows: int) -> None:
    """Exact but for the rounding of a row to 8 bits, and what whole scales cost; with a bias, and outputs that fill no
    panel."""
    bits, block = form
    weight = Blocks.of(noise(131, 160, seed=1), bits).in_form(bits, block).with_bias(noise(131, seed=2))
    linear = Kernels(torch.device("cpu")).choose(LINEAR, LinearSpec(160, 131, Blocks), torch.float32)
    x = noise(num_rows, 160)
    got = linear(x, linear.pack(weight))
    bias = noise(131, seed=2).double()
    exact = product_as_kept(x, weight) + bias
    assert (got - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("block", [32, 16])
@pytest.mark.parametrize("middle", [128, 32, 4])
def test_numbers_of_8_bits_around_a_middle(block: int, middle: int) -> None:
    """What sums begin with stands for minima then; outputs and blocks that fill neither a panel nor a pair."""
    weight = Blocks.of(noise(131, 160, seed=1), 8).in_form(8, block)
    weight = replace(weight, minima=weight.scales * -middle)
    kernels = Kernels(torch.device("cpu"))
    table = kernels.choose(TABLE, LinearSpec(160, 131, Blocks), torch.float32)
    packed = table.pack(weight)
    assert packed.view.middle == middle  # type: ignore[attr-defined]
    assert torch.equal(table.rows(packed, torch.arange(131)), weight.floats())
    for num_rows in (1, 5, 29):
        x = noise(num_rows, 160)
        exact = product_as_kept(x, weight)
        assert (table(x, packed) - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_which_formats_have_a_middle(kind: Type) -> None:
    weight = read_blocks(random_rows(kind), kind)
    assert weight is not None
    middle = matrix_of(weight, *weight.shape[::-1]).middle
    middles = {Type.Q8_0: 128, Type.Q6_K: 32, Type.Q5_0: 16, Type.Q3_K: 4, Type.IQ4_NL: 128, Type.IQ4_XS: 128}
    assert middle == middles.get(kind, 0)


def test_what_whole_scales_cost_in_a_product() -> None:
    """At most an eighth of the row's last bit, times the minimum of numbers that are counted from their middle."""
    weight, x = Blocks.of(noise(131, 160, seed=1), 4), noise(29, 160)
    stored = rounded_rows(x).double() @ weight.floats().double().T
    eighths = row_steps(x)[..., 0] @ (weight.minima.float() / 8 + weight.scales.float()).abs().T
    assert ((product_as_kept(x, weight) - stored).abs() <= 1e-6 * stored.abs().max() + eighths).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_numbers_are_exact(form: tuple[int, int], sign: int) -> None:
    """Of all weights and activations: products of whole numbers that add up to the most there can be."""
    bits, block = form
    most = 2**bits - 1
    halves = torch.ones(40, 96 // block, dtype=torch.float16)
    weight = Blocks.of_numbers(torch.full((40, 96), most, dtype=torch.uint8), halves, 0 * halves, bits)
    linear = Kernels(torch.device("cpu")).choose(LINEAR, LinearSpec(96, 40, Blocks), torch.float32)
    for num_rows in (1, 7):
        x = torch.full((num_rows, 96), sign * 127.0)
        exact = product_as_kept(x, weight)
        assert (linear(x, linear.pack(weight)) == exact).all()
        borrowed = 3 if has_whole_scales(bits) and sign < 0 else 0  # by the sums of three blocks, one each
        assert (exact == sign * 127 * most * 96 + borrowed).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden_by_rounding(broken: float, bits: int) -> None:
    linear = Kernels(torch.device("cpu")).choose(LINEAR, LinearSpec(64, 32, Blocks), torch.float32)
    x = noise(2, 64)
    x[1, 40] = broken
    got = linear(x, linear.pack(Blocks.of(noise(32, 64), bits)))
    assert got[0].isfinite().all() and got[1].isnan().all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("part", ["scales", "minima"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_scales_that_are_not_finite_are_not_hidden_either(broken: float, part: str, bits: int) -> None:
    weight = Blocks.of(noise(32, 64), bits)
    getattr(weight, part)[7, 1] = broken
    linear = Kernels(torch.device("cpu")).choose(LINEAR, LinearSpec(64, 32, Blocks), torch.float32)
    got = linear(noise(2, 64), linear.pack(weight)).isfinite()
    assert not got[:, 7].any() and got.sum() == 2 * 31


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_table_of_blocks_gives_its_rows_back(form: tuple[int, int]) -> None:
    bits, block = form
    weight = Blocks.of(noise(70, 64), bits).in_form(bits, block)
    table = Kernels(torch.device("cpu")).choose(TABLE, LinearSpec(64, 70, Blocks), torch.float32)
    ids = torch.tensor([0, 69, 33, 17])
    assert torch.equal(table.rows(table.pack(weight), ids), weight.floats()[ids])


def test_what_cannot_be_quantised_is_refused(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    for options in ({"dtype": "bfloat16"}, {"kernel_backend": "torch"}):
        with pytest.raises(ModelConfigError, match="quantization int8 needs native kernels"):
            make_driver(tiny[0], quantization="int8", **options)


def test_perplexity_of_the_default() -> None:
    """At most 2 % above that of float32 is promised; half a percent was measured."""
    exact, found = (prose_perplexity(quantization=quantization) for quantization in ("none", "auto"))
    assert found < 1.01 * exact


def test_weights_of_the_embedded_file_stay_small() -> None:
    """As stored: 4 bits, 8 for the table, and two half-precision numbers for 32 of them; the table once."""
    config = RunnerConfig(device="cpu", num_blocks=8, max_num_seqs=2, max_model_len=64)
    _, info = build_runner(config, Group())
    matrices, table, norms = 30 * (576 * (960 + 576 + 3072) + 1536 * 576), 49152 * 576, 61 * 576
    assert info.memory.weights == matrices * 5 // 8 + table * 9 // 8 + norms * 4
