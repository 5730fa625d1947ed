"""Experts in torch: on a CPU a product for each expert that somebody chose, on a GPU one operation for all of them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.experts import ExpertsKernel, ExpertsSpec, ExpertWeights
from worker.kernels.linear import LinearKernel, LinearSpec, PackedWeight
from worker.kernels.torch.elementwise import gelu_and_mul, silu_and_mul
from worker.kernels.torch.linear import OneDnnLinear, PlainLinear, supports_onednn
from worker.kernels.weights import Dense, Grouped, Weight

Products = Sequence[tuple[PackedWeight, PackedWeight]]
"""Of each expert: gate and up, down."""
BLOCK = 32
"""Inputs of a block of whole numbers; those of a checkpoint may be smaller."""


def gated(x: Tensor, spec: ExpertsSpec) -> Tensor:
    """[..., 2 I] → [..., I]. May overwrite x."""
    clamped = spec.clamped
    if clamped is None:
        return silu_and_mul(x) if spec.activation == "silu" else gelu_and_mul(x)
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return (up + 1).mul_(gate).mul_(torch.sigmoid(gate * clamped.alpha))


class HostExperts(ExpertsKernel):
    """Reads on the host who chose what."""

    def __init__(self, spec: ExpertsSpec, linear: LinearKernel) -> None:
        self._spec, self._linear = spec, linear

    def pack(self, weights: ExpertWeights) -> Products:
        gate_ups, downs = _apart(weights.gate_up), _apart(weights.down)
        return [
            (self._linear.pack(gate_up), self._linear.pack(down)) for gate_up, down in zip(gate_ups, downs, strict=True)
        ]

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Products, out: Tensor | None = None) -> Tensor:
        spec = self._spec
        chosen, order = (ids.long() - spec.first_expert).flatten().sort(stable=True)
        bounds = torch.searchsorted(chosen, torch.arange(spec.num_experts + 1)).tolist()
        parts = x.new_zeros(ids.numel(), x.shape[1])
        for expert, (start, end) in enumerate(pairwise(bounds)):
            if start < end:
                gate_up, down = packed[expert]
                pairs = order[start:end]
                inner = gated(self._linear(x[pairs // spec.top_k], gate_up), spec)
                parts[pairs] = self._linear(inner, down)
        return weighted_sum(parts.view(*ids.shape, -1), weights, out)


class ExpandedLinear(LinearKernel):
    """Makes floats of a weight's numbers at each call: one expert's at a time take memory."""

    def pack(self, weight: Weight) -> Weight:
        return weight

    def __call__(self, x: Tensor, packed: Grouped, out: Tensor | None = None) -> Tensor:
        product = functional.linear(x, packed.floats().to(x.dtype), packed.bias)
        return product if out is None else out.copy_(product)


class GroupedExperts(ExpertsKernel):
    """On a GPU: tokens sorted by expert, and one product for each run of them."""

    def __init__(self, spec: ExpertsSpec) -> None:
        self._spec = spec

    def pack(self, weights: ExpertWeights) -> ExpertWeights:
        return weights

    def __call__(
        self, x: Tensor, weights: Tensor, ids: Tensor, packed: ExpertWeights, out: Tensor | None = None
    ) -> Tensor:
        spec, (gate_up, down) = self._spec, (packed.gate_up, packed.down)
        assert isinstance(gate_up, Dense) and isinstance(down, Dense)
        local = (ids.long() - spec.first_expert).flatten()
        is_here = (local >= 0) & (local < spec.num_experts)
        chosen, order = local.where(is_here, spec.num_experts).sort(stable=True)
        experts = torch.arange(spec.num_experts, device=x.device)
        ends = torch.searchsorted(chosen, experts, right=True).int()
        expert = chosen.clamp_(max=spec.num_experts - 1)
        inner = gated(_runs(x[order // spec.top_k], gate_up, ends, expert), spec)
        parts = x.new_empty(len(order), spec.hidden_size)
        parts[order] = _runs(inner, down, ends, expert)
        parts.masked_fill_(~is_here[:, None], 0)  # what the product left there is undefined
        return weighted_sum(parts.view(*ids.shape, -1), weights, out)


class DenseExperts(GroupedExperts):
    """On a GPU, of a dtype that torch has no grouped product for: every expert computes every
    token, and what was not chosen counts nothing."""

    def __call__(
        self, x: Tensor, weights: Tensor, ids: Tensor, packed: ExpertWeights, out: Tensor | None = None
    ) -> Tensor:
        spec = self._spec
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert, (gate_up, down) in enumerate(zip(_apart(packed.gate_up), _apart(packed.down), strict=True)):
            assert isinstance(gate_up, Dense) and isinstance(down, Dense)
            weight = (weights * (ids == expert + spec.first_expert)).sum(-1, keepdim=True)
            inner = gated(functional.linear(x, gate_up.weight, gate_up.bias), spec)
            result = functional.linear(inner, down.weight, down.bias)
            total += torch.where(weight == 0, 0, weight * result)
        return total.to(x.dtype) if out is None else out.copy_(total)


def make_experts(spec: ExpertsSpec, device: torch.device, dtype: torch.dtype) -> HostExperts | GroupedExperts:
    if spec.kind is Grouped:
        return HostExperts(spec, ExpandedLinear())
    if device.type == "cpu":
        shapes = (LinearSpec(spec.hidden_size, 2 * spec.intermediate_size),
                  LinearSpec(spec.intermediate_size, spec.hidden_size))  # fmt: skip
        is_packed = all(supports_onednn(shape, device, dtype) for shape in shapes)
        return HostExperts(spec, OneDnnLinear() if is_packed else PlainLinear())
    # Rows of what the grouped product reads begin at multiples of 16 bytes.
    is_grouped = dtype == torch.bfloat16 and spec.hidden_size % 8 == 0 == spec.intermediate_size % 8
    return GroupedExperts(spec) if is_grouped else DenseExperts(spec)


def supports_experts(spec: ExpertsSpec, device: torch.device, dtype: torch.dtype) -> bool:
    if spec.kind is Grouped:
        return device.type == "cpu" and spec.hidden_size % BLOCK == 0 == spec.intermediate_size % BLOCK
    return spec.kind is Dense


def weighted_sum(parts: Tensor, weights: Tensor, out: Tensor | None) -> Tensor:
    """parts [T, k, H], weights float32 [T, k] → [T, H]. The sum is taken in float32."""
    total = torch.bmm(weights[:, None], parts.float())[:, 0]
    return total.to(parts.dtype) if out is None else out.copy_(total)


def _runs(x: Tensor, weight: Dense, ends: Tensor, expert: Tensor) -> Tensor:
    """The rows up to ends[0] times the first expert's weight, and so on; `expert` [rows]: of each row."""
    product = torch._grouped_mm(x, weight.weight.transpose(1, 2), offs=ends)
    return product if weight.bias is None else product.add_(weight.bias[expert])


def _apart(weight: Weight) -> Sequence[Dense | Grouped]:
    """Each expert's."""
    assert isinstance(weight, Dense | Grouped)
    tensors = weight.weight if isinstance(weight, Dense) else weight.numbers
    biases: Sequence[Tensor | None] = [None] * len(tensors) if weight.bias is None else list(weight.bias)
    if isinstance(weight, Dense):
        return [Dense(each, bias) for each, bias in zip(weight.weight, biases, strict=True)]
    return [weight[expert].with_bias(bias) for expert, bias in enumerate(biases)]
