"""Experts that stay in whole numbers on a CPU: whole models, shards of ranks, and parts in different forms."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.models.cases import VOCABULARY
from tests.models.cases.glm4_moe import GLM
from tests.models.cases.qwen3_moe import QWEN3_MOE
from tests.models.saved import Saved, save
from tests.runner.conftest import make_driver, random_prompt
from tests.runner.gguf_files import Quantised, write_metadata
from tests.runner.gguf_moe import gguf_tensors, glm_metadata, qwen3_metadata
from tests.runner.kept import BACKENDS, HIDDEN, INNER, NUM, run
from tests.runner.logits import capture_logits
from tests.runner.rounding import HALVES, random_rows
from worker.kernels.select import Kernels
from worker.kernels.weights import Blocks, Dense, Grouped, Quantization
from worker.layers.experts import RoutedExperts, apart
from worker.layers.kept_experts import KeptExperts
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import fill
from worker.loader.experts import ExpertsConfig
from worker.loader.gguf.checkpoint import GGUFLazyTensor
from worker.loader.gguf.file import GGUFTensor
from worker.parallel.group import ALONE, Group
from worker.runner.config import RunnerConfig
from worker.runner.load import layer_setup, open_model

Type = GGMLQuantizationType
SIZES = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_hidden_layers": 2, "initializer_range": 0.1}


def random_tensor(kind: Type, *shape: int, std: float = 0.1) -> Quantised:
    """Any bits, but scales."""
    *outputs, inputs = shape
    data = random_rows(kind, int(np.prod(outputs)), inputs)
    factor = np.float16(std / dequantize(data, kind).std())
    blocks = data.reshape(len(data), -1, GGML_QUANT_SIZES[kind][1])
    for at in HALVES[kind]:
        halves = blocks[..., at : at + 2].copy().view(np.float16)
        blocks[..., at : at + 2] = (halves * factor).view(np.uint8)
    return Quantised(data.reshape(*outputs, -1), kind)


def floats_of(tensor: Quantised) -> Tensor:
    return torch.from_numpy(dequantize(tensor.data, tensor.kind))


def plain(values: Tensor) -> Quantised:
    return Quantised(values.numpy().view(np.uint8), Type.F32)


@dataclass
class Model:
    """One whose experts are those numbers, and the same in a GGUF file."""

    saved: Saved
    path: Path
    num_layers: int
    """With experts."""


def make(folder: Path, create: Callable[[], PreTrainedModel], gate_up: Type, down: Type) -> Model:
    """A layer's parts have different bits."""
    tensors: dict[str, np.ndarray | Quantised] = {}

    def with_experts() -> PreTrainedModel:
        model = create()
        for number, layer in enumerate(model.model.layers):
            if not hasattr(layer.mlp, "experts"):
                continue
            both, downs = random_tensor(gate_up, NUM, 2 * INNER, HIDDEN), random_tensor(down, NUM, HIDDEN, INNER)
            layer.mlp.experts.gate_up_proj.data = floats_of(both)
            layer.mlp.experts.down_proj.data = floats_of(downs)
            tensors[f"blk.{number}.ffn_gate_exps.weight"] = Quantised(both.data[:, :INNER], gate_up)
            tensors[f"blk.{number}.ffn_up_exps.weight"] = Quantised(both.data[:, INNER:], gate_up)
            tensors[f"blk.{number}.ffn_down_exps.weight"] = downs
        return model

    saved = save(with_experts, folder / "model")
    is_glm = isinstance(saved.model, Glm4MoeForCausalLM)
    metadata = glm_metadata(saved.model.config, 0) if is_glm else qwen3_metadata(saved.model)
    kind = MODEL_ARCH.GLM4_MOE if is_glm else MODEL_ARCH.QWEN3MOE
    others = gguf_tensors(saved, kind, saved.model.config.num_hidden_layers)
    num_layers = len(tensors) // 3
    write_metadata(folder / "a.gguf", metadata, others | tensors, "glm4moe" if is_glm else "qwen3moe")
    return Model(saved, folder / "a.gguf", num_layers)


def qwen3() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE | SIZES | {"num_experts": NUM, "num_experts_per_tok": 2}))


def glm() -> PreTrainedModel:
    return Glm4MoeForCausalLM(Glm4MoeConfig(**GLM | SIZES | {"n_routed_experts": NUM, "num_experts_per_tok": 2}))


@pytest.mark.parametrize("kinds", [(Type.Q4_0, Type.Q8_0), (Type.Q4_K, Type.Q6_K)], ids=str)
@pytest.mark.parametrize("create", [qwen3, glm])
def test_a_files_experts_stay_as_they_are(
    tmp_path: Path, create: Callable[[], PreTrainedModel], kinds: tuple[Type, Type]
) -> None:
    """With torch's kernels the numbers are the file's, but for scales in two parts, whose product is rounded; native
    ones round activations, too."""
    model = make(tmp_path, create, *kinds)
    prompt = random_prompt(30, 1, VOCABULARY)
    exact = model.saved.logits(prompt)[-1]
    for backend in BACKENDS:
        driver = make_driver(model.path, quantization="auto", kernel_backend=backend, kv_cache_dtype="activations")
        experts = [module for module in driver.runner._model.modules() if isinstance(module, RoutedExperts)]
        assert [each._spec.kind for each in experts] == [Grouped] * model.num_layers
        seen = capture_logits(driver)
        seq = driver.add(prompt)
        driver.prefill(seq)
        error = float((seen[0][0] - exact).abs().max() / exact.abs().max())
        assert error < (0.03 if backend == "native" else 1e-5 if kinds[0] is Type.Q4_0 else 2e-3), (backend, error)


def make_experts(
    tensors: dict[str, Quantised], backend: str, quantization: Quantization, tp: Group = ALONE, ep: Group = ALONE
) -> RoutedExperts:
    config = ExpertsConfig(num_experts=NUM, top_k=2, intermediate_size=INNER)
    setup = LayerSetup(
        Kernels(torch.device("cpu"), backend), tp, torch.float32, expert_quantization=quantization, ep=ep
    )
    experts = RoutedExperts(setup, HIDDEN, config, apart)
    with torch.inference_mode():
        fill(experts.weight_targets("experts"), OfFile(tensors))
        experts.pack()
    return experts


class OfFile:
    """A `Checkpoint`."""

    def __init__(self, tensors: dict[str, Quantised]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def tensor(self, name: str, packed: bool = False) -> GGUFLazyTensor:
        data, kind = self._tensors[name]
        values, size = GGML_QUANT_SIZES[kind]
        return GGUFLazyTensor(GGUFTensor((len(data), data.shape[1] // size * values), kind, data.data.cast("B")), None)


def random_experts(*kinds: Type) -> dict[str, Quantised]:
    """Of kinds in turn."""
    found = {}
    for expert in range(NUM):
        for name, shape in (
            ("gate_proj", (INNER, HIDDEN)),
            ("up_proj", (INNER, HIDDEN)),
            ("down_proj", (HIDDEN, INNER)),
        ):
            found[f"experts.{expert}.{name}.weight"] = random_tensor(kinds[len(found) % len(kinds)], *shape)
    return found


@pytest.mark.parametrize("by_expert", [False, True], ids=["parts of each expert", "experts"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_cut_what_is_stored(monkeypatch: pytest.MonkeyPatch, backend: str, by_expert: bool) -> None:
    """And never expand it."""
    tensors = random_experts(Type.Q4_K, Type.Q4_K, Type.Q6_K)
    whole = make_experts(tensors, backend, "stored")
    monkeypatch.setattr("worker.loader.gguf.checkpoint.rows_of", None)
    groups = [Group(rank, 2) for rank in range(2)]
    ranks = [make_experts(tensors, backend, "stored", tp, tp if by_expert else ALONE) for tp in groups]
    found, exact = run(ranks[0]) + run(ranks[1]), run(whole)
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_becomes_of_experts_beside_linear_layers(tmp_path: Path, backend: str) -> None:
    """Ranks that share a model, and torch's kernels, have linear layers in floats."""
    model = make(tmp_path, qwen3, Type.Q4_0, Type.Q8_0)
    kernels = Kernels(torch.device("cpu"), backend)
    for tp, quantization, linear, experts in (
        (ALONE, "auto", "stored" if backend == "native" else "none", "stored"),
        (Group(1, 2), "auto", "none", "stored"),
        (ALONE, "none", "none", "none"),
    ):
        config = RunnerConfig(model=str(model.path), device="cpu", quantization=quantization)
        setup = layer_setup(open_model(config), config, kernels, tp, torch.float32)
        assert (setup.quantization, setup.expert_quantization) == (linear, experts)


@pytest.mark.parametrize(
    "kinds", [(Type.Q4_K, Type.Q6_K), (Type.Q8_0, Type.Q4_0, Type.Q4_1), (Type.Q6_K, Type.Q5_K)], ids=str
)
def test_parts_in_different_forms_have_one_together(kinds: tuple[Type, ...]) -> None:
    tensors = random_experts(*kinds)
    found = run(make_experts(tensors, "torch", "stored"))
    exact = run(make_experts(tensors, "torch", "none"))
    assert (found - exact).abs().max() < 2e-3 * exact.abs().max()


def test_parts_without_blocks_make_all_of_them_floats() -> None:
    tensors = random_experts(Type.Q4_0, Type.Q6_K)
    for expert in (1, 3):
        name = f"experts.{expert}.gate_proj.weight"
        tensors[name] = plain(floats_of(tensors[name]))
    experts = make_experts(tensors, "torch", "stored")
    assert experts._spec.kind is Dense
    exact = run(make_experts(tensors, "torch", "none"))
    assert (run(experts) - exact).abs().max() < 2e-3 * exact.abs().max()


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
def test_floats_are_cut_as_they_are_read(quantization: Quantization, bits: int) -> None:
    floats = {name: floats_of(tensor) for name, tensor in random_experts(Type.Q6_K).items()}
    cut = {name: Blocks.of(values, bits).floats() for name, values in floats.items()}
    experts = make_experts({name: plain(values) for name, values in floats.items()}, "torch", quantization)
    assert experts._spec.kind is Grouped
    exact = run(make_experts({name: plain(values) for name, values in cut.items()}, "torch", "none"))
    assert (run(experts) - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.skipif("native" not in BACKENDS, reason="needs AVX2 and a C++ compiler")
def test_what_is_asked_for_is_of_experts_too(tmp_path: Path) -> None:
    """Shapes that no block fills stay as they are: an expert of the second model has 24 inner features."""
    for number, (sizes, kind) in enumerate(((SIZES, Grouped), ({}, Dense))):
        saved = save(
            lambda sizes=sizes: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE | sizes)), tmp_path / str(number)
        )
        driver = make_driver(saved.path, quantization="int8")
        experts = [module for module in driver.runner._model.modules() if isinstance(module, RoutedExperts)]
        assert {each._spec.kind for each in experts} == {kind}
        driver.prefill(driver.add(random_prompt(5, 1, VOCABULARY)))


def test_all_experts_in_one_tensor_are_cut_one_by_one() -> None:
    setup = LayerSetup(Kernels(torch.device("cpu"), "torch"), ALONE, torch.float32)
    experts, values = KeptExperts(setup, 3, 8, 64, "int8"), torch.randn(3, 8, 64)
    experts.put(0, values[:, 0::2])
    experts.put(4, values[:, 1::2])
    found = experts.take(None)
    assert isinstance(found, Grouped) and found.numbers.shape == values.shape
    wanted = torch.cat((values[:, 0::2], values[:, 1::2]), 1)
    assert (found.floats() - wanted).abs().max() < 0.02
