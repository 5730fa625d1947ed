"""Routed experts: this rank's shard of them, and the ways in which checkpoints store them."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from worker.kernels.experts import EXPERTS, ClampedSwiglu, ExpertsSpec, ExpertWeights, PackedExperts
from worker.kernels.weights import Dense
from worker.layers.linear import shard_of
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
        )  # fmt: skip
        self._kernel = setup.kernels.choose(EXPERTS, spec, setup.dtype)
        empty = partial(torch.empty, dtype=setup.dtype, device=setup.device)
        zeros = partial(torch.zeros, dtype=setup.dtype, device=setup.device)
        self.gate_up = empty(self.num_experts, 2 * self.size, hidden_size)
        self.down = empty(self.num_experts, hidden_size, self.size)
        self.gate_up_bias = zeros(self.num_experts, 2 * self.size) if config.has_bias else None
        self.down_bias = zeros(self.num_experts, hidden_size) if config.has_bias else None
        self._packed: PackedExperts = None

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return self._layout(self, path)

    def weights(self) -> Iterable[Tensor]:
        return [self.gate_up, self.down]

    def pack(self) -> int:
        weights = ExpertWeights(Dense(self.gate_up, self.gate_up_bias), Dense(self.down, self.down_bias))
        num_bytes = sum(weight.num_bytes for weight in (weights.gate_up, weights.down) if isinstance(weight, Dense))
        self._packed = self._kernel.pack(weights)
        del self.gate_up, self.down, self.gate_up_bias, self.down_bias
        return num_bytes

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
        experts.down[local].copy_(tensor.read(1, experts.start, size))
    else:
        experts.gate_up[local, number * size : (number + 1) * size].copy_(tensor.read(0, experts.start, size))


def _load_stacked_gate_up(experts: RoutedExperts, tensor: LazyTensor) -> None:
    num, inner, hidden = experts.shape
    expect_shape(tensor, (num, 2 * inner, hidden))
    if experts.is_by_expert:
        experts.gate_up.copy_(tensor.read(0, experts.first_expert, experts.num_experts))
        return
    for half in range(2):
        part = tensor.read(1, half * inner + experts.start, experts.size)
        experts.gate_up[:, half * experts.size : (half + 1) * experts.size].copy_(part)


def _load_stacked_down(experts: RoutedExperts, tensor: LazyTensor) -> None:
    num, inner, hidden = experts.shape
    expect_shape(tensor, (num, hidden, inner))
    experts.down.copy_(_own(experts, tensor, 2))


def _load_interleaved(experts: RoutedExperts, tensor: LazyTensor) -> None:
    num, inner, hidden = experts.shape
    expect_shape(tensor, (num, hidden, 2 * inner))
    both = _own(experts, tensor, 2, 2).unflatten(2, (-1, 2))
    experts.gate_up.unflatten(1, (2, -1)).copy_(both.permute(0, 3, 2, 1))


def _load_inputs_first(experts: RoutedExperts, tensor: LazyTensor) -> None:
    num, inner, hidden = experts.shape
    expect_shape(tensor, (num, inner, hidden))
    experts.down.copy_(_own(experts, tensor, 1).transpose(1, 2))


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
    if experts.is_by_expert:
        return tensor.read(0, experts.first_expert, experts.num_experts)
    return tensor.read(dim, width * experts.start, width * experts.size)
