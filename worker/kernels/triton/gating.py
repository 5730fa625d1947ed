"""What experts make of a gate and what it lets through."""

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, alpha, limit, IS_CLAMPED: tl.constexpr):
    """silu(gate) × up; clamped as GPT-OSS has it: the gate from above, up on both sides and one higher."""
    if IS_CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        return gate / (1 + tl.exp(-alpha * gate)) * up
    return gate / (1 + tl.exp(-gate)) * up
