"""The gated delta rule token by token in float64, and the shapes that kernels are held to it in."""

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.delta import DeltaParameters, DeltaSpec

SPECS = [(1, 1, 16, 16, 4), (2, 4, 32, 16, 3), (1, 3, 16, 40, 2)]
"""Key heads, value heads, their dims, width of the convolution."""


def exact_rule(
    spec: DeltaSpec, rule: DeltaParameters, inputs: Tensor, x: Tensor, state: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Outputs and last state of tokens x, [T, C and more], in float64. `inputs`, [W − 1 + T, C]: those before them,
    then theirs. `dtype`: that of the kernels."""
    channels, heads = spec.num_channels, spec.num_value_heads
    _, a, b = x.double().split((channels, heads, heads), -1)
    windows = inputs.double().unfold(0, spec.width, 1)
    # What is between the two operations has the kernels' dtype.
    mixed = functional.silu((windows * rule.taps.double()).sum(-1)).to(dtype).double()
    q, k, v = mixed.split((spec.key_size, spec.key_size, spec.value_size), -1)
    repeats = heads // spec.num_key_heads
    q, k = (
        (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 1)
        for y in (t.unflatten(-1, (spec.num_key_heads, spec.key_dim)) for t in (q, k))
    )
    v = v.unflatten(-1, (heads, spec.value_dim))
    decay = (-rule.log_decay.double().exp() * functional.softplus(a + rule.bias.double())).exp()
    state, outputs = state.double(), []
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        correction = (v[t] - torch.einsum("hn,hnv->hv", k[t], state)) * b[t].sigmoid()[:, None]
        state = state + k[t][:, :, None] * correction[:, None]
        outputs.append(torch.einsum("hn,hnv->hv", q[t], state) * spec.key_dim**-0.5)
    return torch.stack(outputs), state
