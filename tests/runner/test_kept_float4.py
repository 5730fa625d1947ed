"""GPT-OSS' experts of float4_e2m1, which a CPU keeps in whole numbers."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.runner import quantized_files as files
from tests.runner.kept import BACKENDS, HIDDEN, INNER, NUM, run
from tests.runner.stored import Stored
from worker.kernels.select import Kernels
from worker.kernels.weights import Grouped, Quantization
from worker.layers.experts import RoutedExperts, interleaved
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import LazyTensor, fill
from worker.loader.config import CommonConfig
from worker.loader.experts import ExpertsConfig
from worker.loader.quantized.mxfp4 import MxFp4Tensor
from worker.loader.quantized.parts import Parts
from worker.loader.quantized.schemes import MxFp4Experts, QuantizedWeights, Rule
from worker.loader.safetensors_file import SafetensorsCheckpoint
from worker.loader.source import ModelSource, SourceFormat
from worker.parallel.group import ALONE, Group
from worker.runner.config import RunnerConfig
from worker.runner.load import OpenedModel, layer_setup

GPT_OSS = ExpertsConfig(num_experts=NUM, top_k=2, intermediate_size=INNER, has_bias=True, swiglu_limit=0.5)


def test_float4_in_whole_numbers() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(2, 128)
    exponents = torch.tensor([[127, 120, 105, 130, 127, 127, 127, 140]] * 2, dtype=torch.uint8)
    weight = Grouped("e2m1", numbers, exponents)
    whole = weight.in_whole_numbers()
    assert whole is not None and torch.equal(whole.floats(), weight.floats())
    exponents[1, 2] = 141
    assert weight.in_whole_numbers() is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpt_oss(tmp_path: Path, backend: str) -> None:
    """Gates and ups in turns, with biases and a limit; whole, and on two ranks."""
    tensors, exact = float4_experts(tmp_path)
    whole = run(exact_experts(exact))
    found = run(float4_rank(tensors, backend))
    ranks = [float4_rank(tensors, backend, Group(rank, 2)) for rank in range(2)]
    assert all(each._spec.kind is Grouped for each in ranks)
    for got in (found, run(ranks[0]) + run(ranks[1])):
        assert (got - whole).abs().max() < (0.03 if backend == "native" else 1e-5) * whole.abs().max()


class InMemory:
    """A `Checkpoint`."""

    def __init__(self, tensors: dict[str, LazyTensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def tensor(self, name: str, packed: bool = False) -> LazyTensor:
        return self._tensors[name]


def float4_experts(folder: Path) -> tuple[dict[str, LazyTensor], dict[str, Tensor]]:
    """As stored, and in floats."""
    generator = torch.Generator().manual_seed(3)
    tensors, exact = dict[str, LazyTensor](), dict[str, Tensor]()
    for name, shape in (("gate_up_proj", (NUM, HIDDEN, 2 * INNER)), ("down_proj", (NUM, INNER, HIDDEN))):
        made, exact[f"experts.{name}"] = files.mxfp4(torch.randn(shape, generator=generator) * 0.1)
        (folder / name).mkdir()
        save_file(made, folder / name / "model.safetensors")
        tensors[f"experts.{name}"] = MxFp4Tensor(
            Parts({part: part for part in made}, SafetensorsCheckpoint(folder / name))
        )
        bias = torch.randn(NUM, shape[2], generator=generator)
        exact[f"experts.{name}_bias"] = bias
        tensors[f"experts.{name}_bias"] = Stored(bias)
    return tensors, exact


def float4_rank(
    tensors: dict[str, LazyTensor], backend: str, tp: Group = ALONE, quantization: Quantization = "stored"
) -> RoutedExperts:
    kernels = Kernels(torch.device("cpu"), backend)
    setup = LayerSetup(kernels, tp, torch.float32, expert_quantization=quantization)
    experts = RoutedExperts(setup, HIDDEN, GPT_OSS, interleaved)
    with torch.inference_mode():
        fill(experts.weight_targets("experts"), InMemory(tensors))
        experts.pack()
    return experts


def exact_experts(exact: dict[str, Tensor]) -> RoutedExperts:
    return float4_rank({name: Stored(tensor) for name, tensor in exact.items()}, "torch", quantization="none")


@pytest.mark.parametrize(("quantization", "of_experts"), [("auto", "stored"), ("none", "none")])
def test_they_are_kept_unless_told_otherwise(tmp_path: Path, quantization: str, of_experts: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    quantized = QuantizedWeights((Rule(("Linear",), MxFp4Experts()),))
    common = CommonConfig(architecture="A", vocab_size=9, max_model_len=9, quantized=quantized)
    source = ModelSource("m", tmp_path, SourceFormat.SAFETENSORS)
    opened = OpenedModel(source, SafetensorsCheckpoint(tmp_path), common)
    config = RunnerConfig(model="m", device="cpu", quantization=quantization)
    setup = layer_setup(opened, config, Kernels(torch.device("cpu"), "torch"), ALONE, torch.float32)
    assert (setup.quantization, setup.expert_quantization) == ("none", of_experts)
