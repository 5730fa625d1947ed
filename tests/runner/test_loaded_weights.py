"""What layers keep of a quantised checkpoint where kernels read its numbers: shards of ranks, parts, experts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.runner import quantized_files as files
from tests.runner.quantized import FORMATS, checkpoint_of
from tests.runner.rounding import Type, random_rows
from worker.kernels.select import Kernels
from worker.kernels.weights import Blocks, Dense, Grouped
from worker.layers.kept_experts import KeptExperts
from worker.layers.loaded import LoadedWeight
from worker.layers.loaded_experts import LoadedExperts
from worker.layers.setup import LayerSetup
from worker.loader.gguf.checkpoint import GGUFLazyTensor
from worker.loader.gguf.file import GGUFTensor
from worker.loader.quantized.mxfp4 import MxFp4Tensor
from worker.loader.quantized.parts import Parts
from worker.loader.safetensors_file import SafetensorsCheckpoint
from worker.parallel.group import ALONE

OUT, INPUTS = 72, 128
IN_NO_GROUPS = ("fp8-blocks", "w4a16-order", "gptq-order", "gptq-8-bits")


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> LayerSetup:
    monkeypatch.setattr("worker.layers.setup.quantized_kind", lambda *_: Grouped)
    return LayerSetup(Kernels(torch.device("cpu"), "torch"), ALONE, torch.float32, "stored")


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def values(weight: Dense | Blocks | Grouped) -> Tensor:
    return weight.weight if isinstance(weight, Dense) else weight.floats()


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_keep_their_part_of_what_is_stored(tmp_path: Path, setup: LayerSetup, name: str) -> None:
    """Rows of one rank of two, and columns; minima are in half precision."""
    maker, section = FORMATS[name]
    tensors, exact = maker(noise(OUT, INPUTS))
    tensor = checkpoint_of(tmp_path, {f"a.{part}": made for part, made in tensors.items()}, section).tensor("a.weight")
    rows, columns = LoadedWeight(setup, OUT // 2, INPUTS), LoadedWeight(setup, OUT, INPUTS // 2)
    rows.load_rows(0, tensor, OUT // 2, OUT // 2)
    columns.load_columns(tensor, INPUTS // 2, INPUTS // 2)
    for found, wanted in ((rows.take(None), exact[OUT // 2 :]), (columns.take(None), exact[:, INPUTS // 2 :])):
        assert isinstance(found, Dense if name in IN_NO_GROUPS else Grouped)
        assert (values(found) - wanted).abs().max() < 2e-3
        if isinstance(found, Grouped):
            assert found.num_bytes < wanted.numel() * (0.8 if found.form == "uint4" else 1.2)


def test_parts_of_other_forms_become_numbers_together(tmp_path: Path, setup: LayerSetup) -> None:
    weight, parts = LoadedWeight(setup, 2 * OUT, INPUTS), []
    for at, name in ((0, "awq"), (OUT, "fp8-channel")):
        maker, section = FORMATS[name]
        tensors, exact = maker(noise(OUT, INPUTS))
        (tmp_path / name).mkdir()
        stored = checkpoint_of(tmp_path / name, {f"a.{part}": made for part, made in tensors.items()}, section)
        weight.load_rows(at, stored.tensor("a.weight"), 0, OUT)
        parts.append(exact)
    found = weight.take(None)
    assert isinstance(found, Dense) and (found.weight - torch.cat(parts)).abs().max() < 2e-3


@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.004), ("int4", 0.06)])
def test_numbers_are_cut_into_blocks_as_they_come(
    tmp_path: Path, setup: LayerSetup, quantization: str, error: float
) -> None:
    """A layer's floats are never all there."""
    weight = noise(OUT, INPUTS)
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    loaded = LoadedWeight(replace(setup, quantization=quantization), OUT + 3, INPUTS)  # type: ignore[arg-type]
    assert not list(loaded.tensors())
    loaded.load_rows(0, SafetensorsCheckpoint(tmp_path).tensor("a.weight"), 0, OUT)
    loaded.clear_rows(OUT)
    found = loaded.take(None)
    assert isinstance(found, Grouped)
    assert torch.equal(found.floats()[OUT:], torch.zeros(3, INPUTS))
    assert (found.floats()[:OUT] - weight).abs().max() < error * weight.abs().max()


# --- experts


@pytest.mark.parametrize("names", [("awq", "awq"), ("awq", "fp8-blocks")])
def test_experts_of_a_tensor_each(tmp_path: Path, setup: LayerSetup, names: tuple[str, str]) -> None:
    """This rank's columns of each; one that is stored in no groups makes all of them numbers."""
    experts, parts = LoadedExperts(setup, 2, OUT, INPUTS // 2, keeps_stored=True), []
    for expert, name in enumerate(names):
        maker, section = FORMATS[name]
        tensors, exact = maker(noise(OUT, INPUTS))
        (folder := tmp_path / str(expert)).mkdir()
        stored = checkpoint_of(folder, {f"a.{part}": made for part, made in tensors.items()}, section)
        experts.load(expert, 0, stored.tensor("a.weight"), 1, INPUTS // 2, INPUTS // 2)
        parts.append(exact[:, INPUTS // 2 :])
    found = experts.take(None)
    assert isinstance(found, Grouped if names[0] == names[1] else Dense)
    assert (values(found) - torch.stack(parts)).abs().max() < 2e-3


def test_all_experts_in_one_tensor(tmp_path: Path, setup: LayerSetup) -> None:
    tensors, exact = files.mxfp4(noise(3, 64, 10))
    save_file(tensors, tmp_path / "model.safetensors")
    names = {part: part for part in tensors}
    tensor = MxFp4Tensor(Parts(names, SafetensorsCheckpoint(tmp_path)))
    experts = LoadedExperts(setup, 3, 10, 32, keeps_stored=True)
    stored = experts.stored(tensor, 1, 32, 32)
    assert stored is not None
    for half in range(2):
        experts.put(5 * half, stored[:, half::2])
    found = experts.take(None)
    assert isinstance(found, Grouped) and found.form == "e2m1"
    wanted = exact[:, 32:].transpose(1, 2)
    assert torch.equal(found.floats(), torch.cat((wanted[:, ::2], wanted[:, 1::2]), 1))
    assert experts.stored(tensor, 1, 16, 32) is None


def test_columns_of_a_files_blocks(setup: LayerSetup) -> None:
    """Of a GGUF file, where they are whole blocks."""
    tensor = GGUFLazyTensor(GGUFTensor((6, 768), Type.Q4_K, random_rows(Type.Q4_K).data.cast("B")), None)
    weight = LoadedWeight(setup, 6, 256)
    weight.load_columns(tensor, 256, 256)
    found = weight.take(None)
    assert isinstance(found, Grouped) and found.form == "uint4"
    wanted = tensor.read(1, 256, 256)
    assert (found.floats() - wanted).abs().max() < 2**-11 * wanted.abs().max()
    assert tensor.stored(1, 16, 256) is None


def test_what_waits_for_a_kernel_is_no_larger_than_what_it_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: four bits are half a byte already."""
    monkeypatch.setattr("worker.layers.setup.quantized_kind", lambda *_: Blocks)
    setup = LayerSetup(Kernels(torch.device("cpu"), "torch"), ALONE, torch.float32, "stored")
    weight = LoadedWeight(setup, 6, 768)
    weight.load_rows(
        0, GGUFLazyTensor(GGUFTensor((6, 768), Type.Q4_K, random_rows(Type.Q4_K).data.cast("B")), None), 0, 6
    )
    (waiting,) = weight._pieces.values()
    found = weight.take(None)
    assert isinstance(waiting, Blocks) and isinstance(found, Blocks)
    assert waiting.num_bytes == found.num_bytes == 6 * 768 * 5 // 8
    assert torch.equal(waiting.floats(), found.floats())


@pytest.mark.parametrize("name", ["awq", "w4a16-zeros", "gptq"])
def test_a_cpus_experts_of_other_checkpoints(tmp_path: Path, setup: LayerSetup, name: str) -> None:
    maker, section = FORMATS[name]
    tensors, exact = maker(noise(OUT, INPUTS))
    tensor = checkpoint_of(tmp_path, {f"a.{part}": made for part, made in tensors.items()}, section).tensor("a.weight")
    experts = KeptExperts(setup, 2, OUT, INPUTS // 2, "stored")
    for expert in range(2):
        experts.load(expert, 0, tensor, 1, expert * INPUTS // 2, INPUTS // 2)
    found = experts.take(None)
    assert isinstance(found, Grouped) and found.form == "uint4"
    assert (found.floats() - torch.stack(exact.chunk(2, 1))).abs().max() < 2e-3
