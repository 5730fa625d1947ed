"""The gated delta rule for rows of one token: the state is read and written once."""

import triton
import triton.language as tl

from worker.kernels.triton.overlap import let_next_begin, wait_for_kernel_before

L2_EPS = tl.constexpr(1e-6)


@triton.jit
def log_decay_of(a, log_decay, bias):
    """−exp(log_decay) × softplus(a + bias), in float32."""
    x = a.to(tl.float32) + bias
    small = tl.exp(-tl.abs(x))
    # log(1 + small), for all but the smallest corrected by what the sum's rounding took away.
    above_one = 1 + small
    rest = tl.where(above_one == 1, small, tl.log(above_one) * (small / (above_one - 1)))
    return -tl.exp(log_decay) * (tl.maximum(x, 0.0) + rest)


@triton.jit
def update_rows_kernel(
    qkv, a, b, log_decay, bias, recurrent, out, groups, gate_stride,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    N: tl.constexpr, VALUES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a row, value head and block of `VALUES` columns of its state, whose rows, and the keys, are `N` with
    padding."""
    let_next_begin(OVERLAPS)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, N)
    v = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = n < KEY_DIM, v < VALUE_DIM
    state_at = recurrent + (tl.load(groups + row) * NUM_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_at += n[:, None] * VALUE_DIM + v[None, :]
    inside = is_key[:, None] & is_value[None, :]
    # No kernel of this step has written it.
    state = tl.load(state_at, mask=inside, other=0.0)
    rate, shift = tl.load(log_decay + head), tl.load(bias + head)
    wait_for_kernel_before(OVERLAPS)
    qkv_row = qkv + row * (2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM)
    q_at = qkv_row + head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM + n
    q = tl.load(q_at, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(q_at + NUM_KEY_HEADS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
    value_at = qkv_row + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    value = tl.load(value_at, mask=is_value, other=0.0).to(tl.float32)
    q *= KEY_DIM**-0.5 / tl.sqrt(tl.sum(q * q, 0) + L2_EPS)
    k *= 1 / tl.sqrt(tl.sum(k * k, 0) + L2_EPS)
    decay = tl.exp(log_decay_of(tl.load(a + row * gate_stride + head), rate, shift))
    beta = tl.sigmoid(tl.load(b + row * gate_stride + head).to(tl.float32))
    state *= decay
    correction = (value - tl.sum(k[:, None] * state, 0)) * beta
    state += k[:, None] * correction[None, :]
    tl.store(state_at, state, mask=inside)
    found = tl.sum(q[:, None] * state, 0)
    tl.store(out + (row * NUM_HEADS + head) * VALUE_DIM + v, found.to(out.dtype.element_ty), mask=is_value)
