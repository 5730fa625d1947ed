"""Experts with random weights, computed in float64."""

import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.rig import Rig
from worker.kernels.experts import (
    EXPERTS,
    ClampedSwiglu,
    ExpertsSpec,
    ExpertWeights,
)
from worker.kernels.weights import Dense

SPEC = ExpertsSpec(num_experts=6, hidden_size=48, intermediate_size=32, top_k=3)
CLAMPED = ClampedSwiglu(alpha=1.7, limit=0.8)


class Experts:
    """Random experts, and tokens that go to them."""

    def __init__(self, rig: Rig, spec: ExpertsSpec, num_tokens: int) -> None:
        self.rig, self.spec = rig, spec
        inner, hidden = spec.intermediate_size, spec.hidden_size
        self.gate_up = rig.noise(spec.num_experts, 2 * inner, hidden, seed=1) * hidden**-0.5
        self.down = rig.noise(spec.num_experts, hidden, inner, seed=2) * inner**-0.5
        biases = rig.noise(spec.num_experts, 2 * inner, seed=3), rig.noise(spec.num_experts, hidden, seed=4)
        self.gate_up_bias, self.down_bias = biases if spec.has_bias else (None, None)
        self.x = rig.noise(num_tokens, hidden, seed=5)
        self.weights = rig.noise(num_tokens, spec.top_k, seed=6).float().softmax(-1)
        scores = torch.randn(num_tokens, spec.num_experts, generator=torch.Generator().manual_seed(7))
        self.ids = scores.topk(spec.top_k, -1).indices.to(rig.device) + spec.first_expert
        self.kernel = rig.choose(EXPERTS, spec)
        self.packed = self.kernel.pack(
            ExpertWeights(
                Dense(self.gate_up.clone(), _copy(self.gate_up_bias)), Dense(self.down.clone(), _copy(self.down_bias))
            )
        )

    def __call__(self, ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self.kernel(self.x.clone(), self.weights, self.ids if ids is None else ids, self.packed, out)

    def exact(self, ids: Tensor | None = None) -> Tensor:
        total = torch.zeros(self.x.shape, dtype=torch.float64, device=self.x.device)
        for token, chosen in enumerate((self.ids if ids is None else ids).tolist()):
            for place, expert in enumerate(chosen):
                if 0 <= expert - self.spec.first_expert < self.spec.num_experts:
                    result = self._exact_expert(expert - self.spec.first_expert, self.x[token].double())
                    total[token] += self.weights[token, place].double() * result
        return total

    def _product(self, weight: Tensor, x: Tensor) -> Tensor:
        return weight.double() @ x

    def _exact_expert(self, expert: int, x: Tensor) -> Tensor:
        both = self._product(self.gate_up[expert], x)
        if self.gate_up_bias is not None:
            both += self.gate_up_bias[expert].double()
        gate, up = both.chunk(2)
        if (clamped := self.spec.clamped) is not None:
            gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit) + 1
            gate = gate * torch.sigmoid(clamped.alpha * gate)
        else:
            is_silu = self.spec.activation == "silu"
            gate = functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh")
        result = self._product(self.down[expert], gate * up)
        return result if self.down_bias is None else result + self.down_bias[expert].double()


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()
