"""The gated delta rule for rows of few tokens, one after another: the state is read and written once."""

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
def _take_in(state, k, value, a, b, rate, shift):
    """The state after one more token: its key, not normed yet, and its value."""
    k *= 1 / tl.sqrt(tl.sum(k * k, 0) + L2_EPS)
    state *= tl.exp(log_decay_of(a, rate, shift))
    correction = (value - tl.sum(k[:, None] * state, 0)) * tl.sigmoid(b.to(tl.float32))
    return state + k[:, None] * correction[None, :]


@triton.jit
def update_rows_kernel(
    qkv, a, b, log_decay, bias, recurrent, log, out, groups, query_starts, positions, lag, gate_stride,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    N: tl.constexpr, VALUES: tl.constexpr, TENTATIVE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a row, value head and block of `VALUES` columns of its state, whose rows, and the keys, are `N` with
    padding.

    Without tentative rows (TENTATIVE, their most tokens, is 0) all have one token. Else they may have any number, and
    more than TENTATIVE are left to others, once the state has caught up.
    """
    let_next_begin(OVERLAPS)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, N)
    v = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = n < KEY_DIM, v < VALUE_DIM
    group = tl.load(groups + row)
    state_at = recurrent + (group * NUM_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_at += n[:, None] * VALUE_DIM + v[None, :]
    inside = is_key[:, None] & is_value[None, :]
    # No kernel of this step has written it.
    state = tl.load(state_at, mask=inside, other=0.0)
    rate, shift = tl.load(log_decay + head), tl.load(bias + head)
    KEYS: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    k_place, v_place = key_head * KEY_DIM + n, KEYS + head * VALUE_DIM + v
    first, num_tokens, num_taken, position = row, 1, 1, row
    if TENTATIVE > 0:
        first = tl.load(query_starts + row).to(tl.int64)
        num_tokens = tl.load(query_starts + row + 1) - first
        position, num_late = tl.load(positions + first), tl.load(lag + row)
        GATES: tl.constexpr = KEYS + NUM_HEADS * VALUE_DIM
        log += group * (2 * TENTATIVE * (GATES + 2 * NUM_HEADS))
        for i in range(num_late):
            token = log + (position - num_late + i) % (2 * TENTATIVE) * (GATES + 2 * NUM_HEADS)
            late_k = tl.load(token + k_place, mask=is_key, other=0.0).to(tl.float32)
            late_value = tl.load(token + v_place, mask=is_value, other=0.0).to(tl.float32)
            late_a, late_b = tl.load(token + GATES + head), tl.load(token + GATES + NUM_HEADS + head)
            state = _take_in(state, late_k, late_value, late_a, late_b, rate, shift)
        tl.store(state_at, state, mask=inside & (num_late > 0) & (num_tokens > 1))
        num_taken = tl.where(num_tokens > TENTATIVE, 0, num_tokens)
    wait_for_kernel_before(OVERLAPS)
    for i in range(num_taken):
        token = first + i
        q_at = qkv + token * (2 * KEYS + NUM_HEADS * VALUE_DIM) + key_head * KEY_DIM + n
        q = tl.load(q_at, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(q_at + KEYS, mask=is_key, other=0.0)
        value_at = qkv + token * (2 * KEYS + NUM_HEADS * VALUE_DIM) + KEYS + v_place
        value = tl.load(value_at, mask=is_value, other=0.0)
        token_a, token_b = tl.load(a + token * gate_stride + head), tl.load(b + token * gate_stride + head)
        state = _take_in(state, key.to(tl.float32), value.to(tl.float32), token_a, token_b, rate, shift)
        q *= KEY_DIM**-0.5 / tl.sqrt(tl.sum(q * q, 0) + L2_EPS)
        found = tl.sum(q[:, None] * state, 0)
        tl.store(out + (token * NUM_HEADS + head) * VALUE_DIM + v, found.to(out.dtype.element_ty), mask=is_value)
        if TENTATIVE > 0:
            # Not where others may still read what this row makes up for: the log has room for both.
            logged = log + (position + i) % (2 * TENTATIVE) * (GATES + 2 * NUM_HEADS)
            is_logged = num_tokens > 1
            tl.store(logged + v_place, value, mask=is_value & is_logged)
            is_first = is_logged & (tl.program_id(2) == 0)
            is_first_of_key = is_first & (head % (NUM_HEADS // NUM_KEY_HEADS) == 0)
            tl.store(logged + k_place, key, mask=is_key & is_first_of_key)
            tl.store(logged + GATES + head, token_a, mask=is_first)
            tl.store(logged + GATES + NUM_HEADS + head, token_b, mask=is_first)
    tl.store(state_at, state, mask=inside & (num_tokens == 1))
