"""What experts make of a gate and what it lets through."""

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, alpha, limit, GATE: tl.constexpr):
    """activation(gate) × up; clamped as GPT-OSS has it: the gate from above, up on both sides and one higher."""
    if GATE == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        return gate / (1 + tl.exp(-alpha * gate)) * up
    if GATE == "gelu_tanh":  # (1 + tanh(x)) / 2 is the sigmoid of 2 x
        return gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    return gate / (1 + tl.exp(-gate)) * up
