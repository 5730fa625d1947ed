"""Quantised checkpoints: logits are those of `transformers` with the weights that the files mean."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.runner import quantized_files as files
from tests.runner.conftest import make_driver, random_prompt
from tests.runner.logits import capture_logits
from tests.runner.quantized import FORMATS, checkpoint_of, make
from worker.kernels.native.library import obstacle
from worker.kernels.weights import Blocks
from worker.loader.errors import WeightsError
from worker.loader.quantized.checkpoint import QuantizedCheckpoint
from worker.loader.quantized.schemes import MxFp4Experts, QuantizedWeights, Rule
from worker.loader.safetensors_file import SafetensorsCheckpoint

IN_BLOCKS = ("w4a16", "w4a16-zeros", "w8a16-channel", "awq", "gptq")


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_weights_that_the_files_mean(tmp_path: Path, name: str) -> None:
    model = make(tmp_path, name)
    assert error_of(tmp_path, model, quantization="none") < 1e-4


def error_of(folder: Path, model: LlamaForCausalLM, **options: Any) -> float:
    driver = make_driver(folder, **options)
    seen = capture_logits(driver)
    prompt = random_prompt(20, 0)
    driver.prefill(driver.add(prompt))
    with torch.inference_mode():
        return float((seen[0][0] - model(torch.tensor([prompt])).logits[0, -1]).abs().max())


@pytest.mark.parametrize("name", FORMATS)
def test_a_slice_is_that_of_the_whole(tmp_path: Path, name: str) -> None:
    """At places that no word, group or block begins at: ranks of tensor parallelism read such slices."""
    maker, section = FORMATS[name]
    tensors, exact = maker(torch.randn(72, 96, generator=torch.Generator().manual_seed(1)))
    tensor = checkpoint_of(tmp_path, {f"a.{part}": made for part, made in tensors.items()}, section).tensor("a.weight")
    assert tensor.shape == (72, 96)
    for dim, start, length in ((0, 0, 72), (0, 5, 30), (0, 71, 1), (1, 3, 50), (1, 90, 6)):
        assert torch.equal(tensor.read(dim, start, length), exact.narrow(dim, start, length))
    assert torch.equal(tensor.read(), exact)


def test_older_files_have_the_section_under_another_name(tmp_path: Path) -> None:
    model = make(tmp_path, "w4a16", "compression_config")
    assert error_of(tmp_path, model) < 1e-4


@pytest.mark.skipif(obstacle() is not None, reason="needs AVX2 and a C++ compiler")
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_whole_numbers_stay_as_stored_on_a_cpu(tmp_path: Path, name: str) -> None:
    """The same numbers, and minima in half precision."""
    maker, section = FORMATS[name]
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    tensors, exact = maker(weight)
    blocks = checkpoint_of(tmp_path, {f"a.{part}": made for part, made in tensors.items()}, section).tensor(
        "a.weight"
    ).stored(0, 8, 24)  # fmt: skip
    assert isinstance(blocks, Blocks)
    assert (blocks.bits, blocks.block) == (8 if "8" in name else 4, 32)
    assert (blocks.floats() - exact[8:32]).abs().max() < 2e-3


@pytest.mark.skipif(obstacle() is not None, reason="needs AVX2 and a C++ compiler")
def test_a_model_of_whole_numbers_runs_on_them_by_default(tmp_path: Path) -> None:
    """Up to the rounding of activations to 8 bits."""
    model = make(tmp_path, "w4a16-zeros")
    assert 1e-4 < error_of(tmp_path, model, quantization="auto", kv_cache_dtype="activations") < 0.2


def test_order_of_groups_cannot_stay_in_blocks(tmp_path: Path) -> None:
    maker, section = FORMATS["gptq-order"]
    tensors, _ = maker(torch.randn(8, 64))
    tensor = checkpoint_of(tmp_path, {f"a.{part}": made for part, made in tensors.items()}, section).tensor("a.weight")
    assert tensor.stored(0, 0, 8) is None


def test_mxfp4_experts(tmp_path: Path) -> None:
    tensors, exact = files.mxfp4(torch.randn(3, 64, 10, generator=torch.Generator().manual_seed(1)))
    save_file({f"mlp.experts.up_{part}": made for part, made in tensors.items()} | {"mlp.experts.up_bias":
              torch.ones(3, 10)}, tmp_path / "model.safetensors")  # fmt: skip
    checkpoint = QuantizedCheckpoint(
        SafetensorsCheckpoint(tmp_path), QuantizedWeights((Rule(("Linear",), MxFp4Experts()),))
    )
    assert sorted(checkpoint.names()) == ["mlp.experts.up", "mlp.experts.up_bias"]
    tensor = checkpoint.tensor("mlp.experts.up")
    theirs = convert_moe_packed_tensors(tensors["blocks"], tensors["scales"], dtype=torch.float32)
    assert torch.equal(tensor.read(), theirs) and torch.equal(exact, theirs)
    for dim, start, length in ((0, 1, 1), (1, 20, 30), (2, 3, 5)):
        assert torch.equal(tensor.read(dim, start, length), exact.narrow(dim, start, length))


def break_tensor(folder: Path, name: str, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    stored = tensors.pop(name)
    if change is not None:
        tensors[name] = change(stored)
    save_file(tensors, folder / "model.safetensors")


PROJECTION = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        ("gptq", "qzeros", None, "but no qzeros beside"),
        ("gptq", "g_idx", lambda order: order + 1, "names one beyond the 2 that there are"),
        ("awq", "scales", lambda scales: scales[:1].clone(), r"scales is \(1, 64\); \(2, 64\) is needed"),
        ("awq", "qzeros", lambda zeros: zeros[:, :1].clone(), r"zero points is \(2, 1\); \(2, 8\) is needed"),
        ("w4a16", "weight_packed", lambda words: words.float(), r"packed in torch\.float32"),
        ("w4a16", "weight_shape", lambda shape: shape[:1].clone(), r"is said to be \(64,\); two sizes"),
        ("fp8-blocks", "weight", None, "but no weight beside"),
        ("fp8-blocks", "weight", lambda weight: weight.float(), r"stored as torch\.float32; torch\.float8_e4m3fn"),
        ("fp8-blocks", "weight_scale_inv", None, "stored as F8_E4M3; one of F64"),
        ("fp8-blocks", "weight_scale_inv", lambda scales: scales[:1].clone(), r"scales is \(1, 2\), blocks of"),
        ("fp8-channel", "weight_scale", lambda scales: scales[:5].clone(), "neither of the tensor nor of its 64 rows"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(tmp_path: Path, name: str, part: str, change: Any, message: str) -> None:
    make(tmp_path, name)
    break_tensor(tmp_path, f"{PROJECTION}.{part}", change)
    with pytest.raises(WeightsError, match=rf"tensor {PROJECTION}\.weight: .*{message}"):
        make_driver(tmp_path)


def test_what_is_said_to_be_plain_is_not_quantised(tmp_path: Path) -> None:
    make(tmp_path, "awq")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.\w+\.\w+_proj is in modules_to_not_convert"):
        make_driver(tmp_path)


def test_a_module_that_is_left_as_it_is(tmp_path: Path) -> None:
    model = make(tmp_path, "w4a16")
    with torch.no_grad():
        plain = model.get_parameter(f"{PROJECTION}.weight").mul_(1.01)
    tensors = {
        name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items() if PROJECTION not in name
    }
    save_file(tensors | {f"{PROJECTION}.weight": plain}, tmp_path / "model.safetensors")
    assert error_of(tmp_path, model) < 1e-4
