"""Routed experts: this rank's shard of them, and the ways in which checkpoints store them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from worker.kernels.experts import EXPERTS, ClampedSwiglu, ExpertsSpec, ExpertWeights, PackedExperts
from worker.kernels.weights import Dense, Grouped
from worker.layers.kept_experts import KeptExperts
from worker.layers.linear import shard_of
from worker.layers.loaded_experts import LoadedExperts
from worker.layers.setup import LayerSetup
from worker.layers.weighted import WeightedLayer, expect_shape
from worker.loader.checkpoint import LazyTensor, WeightTarget
from worker.loader.experts import ExpertsConfig


class RoutedExperts(WeightedLayer):
    """Some of the experts, where ranks share them out (`LayerSetup.ep`); else a part of each, as of any MLP."""

    def __init__(self, setup: LayerSetup, hidden_size: int, config: ExpertsConfig, layout: "ExpertsLayout") -> None:
        super().__init__()
        self._layout = layout
        self.shape = (config.num_experts, config.intermediate_size, hidden_size)
        """Of the whole model's: E, I, H."""
        self.is_by_expert = setup.ep.size > 1
        self.first_expert, self.start = 0, 0
        """The first expert, and the first of the inner features, that are here."""
        self.num_experts, self.size = config.num_experts, config.intermediate_size
        if self.is_by_expert:
            self.num_experts = setup.ep.share(config.num_experts, "experts")
            self.first_expert = setup.ep.rank * self.num_experts
        else:
            self.start, self.size = shard_of(config.intermediate_size, setup.tp, "an expert")
        self.has_down_bias = config.has_bias and (self.is_by_expert or setup.tp.rank == 0)
        """On one rank alone, or the sum over ranks would hold it several times."""
        clamped = None if config.swiglu_limit is None else ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit)
        spec = ExpertsSpec(
            self.num_experts, hidden_size, self.size, config.top_k, self.first_expert,
            "gelu_tanh" if config.is_gelu else "silu", clamped, config.has_bias,
            num_elsewhere=config.num_experts - self.num_experts,
        )  # fmt: skip
        self._setup, self._spec = setup, spec
        self._kernel = setup.kernels.choose(EXPERTS, spec, setup.dtype)
        self.gate_up, self.down = self._loaded(2 * self.size, hidden_size), self._loaded(hidden_size, self.size)
        zeros = partial(torch.zeros, dtype=setup.dtype, device=setup.device)
        self.gate_up_bias = zeros(self.num_experts, 2 * self.size) if config.has_bias else None
        self.down_bias = zeros(self.num_experts, hidden_size) if config.has_bias else None
        self._packed: PackedExperts = None

    def _loaded(self, out: int, inputs: int) -> LoadedExperts | KeptExperts:
        setup, quantization = self._setup, self._setup.expert_quantization
        if setup.kernels.find(EXPERTS, replace(self._spec, kind=Grouped), setup.dtype) is None:
            quantization = "none"
        if quantization == "none" or setup.device.type != "cpu":
            return LoadedExperts(setup, self.num_experts, out, inputs, keeps_stored=quantization == "stored")
        return KeptExperts(setup, self.num_experts, out, inputs, quantization)

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return self._layout(self, path)

    def weights(self) -> Iterable[Tensor]:
        return [*self.gate_up.tensors(), *self.down.tensors()]

    def fill(self, noise: Callable[[Tensor], object]) -> None:
        self.gate_up.fill(noise)
        self.down.fill(noise)

    def pack(self) -> int:
        gate_up, down = self.gate_up.take(self.gate_up_bias), self.down.take(self.down_bias)
        if type(gate_up) is not type(down):
            gate_up, down = self._floats(gate_up), self._floats(down)
        self._spec = replace(self._spec, kind=type(gate_up))
        self._kernel = self._setup.kernels.choose(EXPERTS, self._spec, self._setup.dtype)
        self._packed = self._kernel.pack(ExpertWeights(gate_up, down))
        del self.gate_up, self.down, self.gate_up_bias, self.down_bias
        return gate_up.num_bytes + down.num_bytes

    def _floats(self, weight: Dense | Grouped) -> Dense:
        return weight if isinstance(weight, Dense) else Dense(weight.floats().to(self._setup.dtype), weight.bias)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, out: Tensor | None) -> Tensor:
        """See `ExpertsKernel`."""
        return self._kernel(x, weights, ids, self._packed, out)


ExpertsLayout = Callable[[RoutedExperts, str], dict[str, WeightTarget]]
"""Checkpoint name → how to load it, of experts with a path."""
HF_NAMES = ("gate_proj", "up_proj", "down_proj")


def apart(experts: RoutedExperts, path: str, names: tuple[str, str, str] = HF_NAMES) -> dict[str, WeightTarget]:
    """Three tensors of each expert: `experts.3.gate_proj.weight`. Other ranks' experts are named and not read."""
    targets: dict[str, WeightTarget] = {}
    for expert in range(experts.shape[0]):
        for number, name in enumerate(names):
            targets[f"{path}.{expert}.{name}.weight"] = partial(_load_part, experts, expert, number)
    return targets


def stacked(experts: RoutedExperts, path: str) -> dict[str, WeightTarget]:
    """All experts' gates and ups in one tensor [E, 2 I, H], all downs in another, [E, H, I]."""
    return {
        f"{path}.gate_up_proj": partial(_load_stacked_gate_up, experts),
        f"{path}.down_proj": partial(_load_stacked_down, experts),
    }


def interleaved(experts: RoutedExperts, path: str) -> dict[str, WeightTarget]:
    """As GPT-OSS has them: [E, H, 2 I] with gates and ups in turns, [E, I, H], and a bias of each."""
    targets: dict[str, WeightTarget] = {
        f"{path}.gate_up_proj": partial(_load_interleaved, experts),
        f"{path}.down_proj": partial(_load_inputs_first, experts),
    }
    if experts.gate_up_bias is not None:
        targets[f"{path}.gate_up_proj_bias"] = partial(_load_interleaved_bias, experts)
        targets[f"{path}.down_proj_bias"] = partial(_load_down_bias, experts)
    return targets


def _load_part(experts: RoutedExperts, expert: int, number: int, tensor: LazyTensor) -> None:
    _, inner, hidden = experts.shape
    expect_shape(tensor, (hidden, inner) if number == 2 else (inner, hidden))
    local, size = expert - experts.first_expert, experts.size
    if not 0 <= local < experts.num_experts:
        return
    if number == 2:
        experts.down.load(local, 0, tensor, 1, experts.start, size)
    else:
        experts.gate_up.load(local, number * size, tensor, 0, experts.start, size)


def _load_stacked_gate_up(experts: RoutedExperts, tensor: LazyTensor) -> None:
    num, inner, hidden = experts.shape
    expect_shape(tensor, (num, 2 * inner, hidden))
    if experts.is_by_expert:
        experts.gate_up.put(0, tensor.read(0, experts.first_expert, experts.num_experts))
        return
    for half in range(2):
        experts.gate_up.put(half * experts.size, tensor.read(1, half * inner + experts.start, experts.size))


def _load_stacked_down(experts: RoutedExperts, tensor: LazyTensor) -> None:
    num, inner, hidden = experts.shape
    expect_shape(tensor, (num, hidden, inner))
    experts.down.put(0, _own(experts, tensor, 2))


def _load_interleaved(experts: RoutedExperts, tensor: LazyTensor) -> None:
    num, inner, hidden = experts.shape
    expect_shape(tensor, (num, hidden, 2 * inner))
    stored = experts.gate_up.stored(tensor, *_own_slice(experts, 2, 2))
    both = _own(experts, tensor, 2, 2).transpose(1, 2) if stored is None else stored
    for half in range(2):
        experts.gate_up.put(half * experts.size, both[:, half::2])


def _load_inputs_first(experts: RoutedExperts, tensor: LazyTensor) -> None:
    num, inner, hidden = experts.shape
    expect_shape(tensor, (num, inner, hidden))
    stored = experts.down.stored(tensor, *_own_slice(experts, 1))
    experts.down.put(0, _own(experts, tensor, 1).transpose(1, 2) if stored is None else stored)


def _load_interleaved_bias(experts: RoutedExperts, tensor: LazyTensor) -> None:
    assert experts.gate_up_bias is not None
    num, inner, _ = experts.shape
    expect_shape(tensor, (num, 2 * inner))
    both = _own(experts, tensor, 1, 2).unflatten(1, (-1, 2))
    experts.gate_up_bias.unflatten(1, (2, -1)).copy_(both.transpose(1, 2))


def _load_down_bias(experts: RoutedExperts, tensor: LazyTensor) -> None:
    assert experts.down_bias is not None
    num, _, hidden = experts.shape
    expect_shape(tensor, (num, hidden))
    if experts.has_down_bias:
        experts.down_bias.copy_(tensor.read(0, experts.first_expert, experts.num_experts))


def _own(experts: RoutedExperts, tensor: LazyTensor, dim: int, width: int = 1) -> Tensor:
    """This rank's part of a tensor of all experts, whose dimension `dim` has `width` numbers of each inner feature."""
    return tensor.read(*_own_slice(experts, dim, width))


def _own_slice(experts: RoutedExperts, dim: int, width: int = 1) -> tuple[int, int, int]:
    """(dimension, start, length) of `_own`."""
    if experts.is_by_expert:
        return 0, experts.first_expert, experts.num_experts
    return dim, width * experts.start, width * experts.size
